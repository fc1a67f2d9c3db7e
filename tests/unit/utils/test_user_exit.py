"""A user's function that calls ``sys.exit`` is named at once, and what runs beside it goes on."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.hooks import load_function
from slime.ray.data_buffer import DataBuffer
from slime.rollout.base_types import call_dynamic_filter
from slime.rollout.custom_generate import GenerateFunction
from slime.rollout.failures import Attempts
from slime.rollout.rm_hub import async_rm
from slime.utils.async_utils import AsyncLoopThread, UserExit, call_in_thread, exits_are_errors
from slime.utils.errors import ConfigError, ScoringError

HERE = rf"\({__file__}:\d+\) called sys.exit\(3\)"


def exits(*args: Any, **kwargs: Any) -> None:
    sys.exit(3)


async def exits_later(*args: Any, **kwargs: Any) -> None:
    await asyncio.sleep(0)
    sys.exit(3)


def test_a_task_that_exits_ends_neither_the_loop_nor_other_tasks():
    """The thread of the loop ended, and its callers waited 139 s for ``(no stack)``."""
    loop = AsyncLoopThread()

    async def both() -> list[Any]:
        other = asyncio.create_task(asyncio.sleep(0.05, "went on"))
        results = await asyncio.gather(asyncio.create_task(exits_later()), other, return_exceptions=True)
        return [other.result(), *results]

    with pytest.raises(UserExit, match="exits_later " + HERE):
        loop.run(exits_later(), stall_s=20)
    assert loop.run(both(), stall_s=20)[0] == "went on"


@pytest.mark.parametrize("function", [exits, exits_later])
def test_a_reward_that_exits_is_a_failed_sample(function: Any):
    args = SimpleNamespace(custom_rm_path=f"{__file__}:{function.__name__}")
    with pytest.raises(ScoringError, match=rf"on sample 7 raised UserExit: {function.__name__} {HERE}"):
        asyncio.run(async_rm(args, Sample(index=7)))


@pytest.mark.parametrize("function", [exits, exits_later])
def test_generation_that_exits_is_tried_again_and_given_up(function: Any):
    sample = Sample(index=7, tokens=[1])

    args = SimpleNamespace(custom_generate_timeout=60.0)

    async def generate() -> Any:
        for attempt in Attempts([sample], retries=1, what="f"):
            with attempt:
                return await GenerateFunction(args, function).of_one(sample, {}, evaluation=False)
        return None

    assert asyncio.run(generate()) is None
    failure = sample.metadata["failure"]
    assert (failure["boundary"], failure["type"]) == ("generate", "UserExit")
    assert f"({__file__}:" in failure["message"]


def test_a_filter_that_exits_is_an_error_with_its_line():
    with pytest.raises(UserExit, match="exits " + HERE):
        asyncio.run(call_in_thread(call_dynamic_filter, exits, SimpleNamespace(), []))


def test_other_exceptions_that_are_no_exception_are_named_as_well():
    def interrupts() -> None:
        raise KeyboardInterrupt

    with pytest.raises(UserExit, match=r"interrupts \(.*\) raised KeyboardInterrupt\(\)"):
        asyncio.run(call_in_thread(interrupts))


def test_cancelling_is_no_exit():
    async def cancelled() -> None:
        task = asyncio.create_task(call_in_thread(asyncio.run, asyncio.sleep(0.2)))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_data_source_that_exits_does_not_end_its_process():
    buffer = DataBuffer.__new__(DataBuffer)
    buffer._source = SimpleNamespace(get_samples=exits)
    with pytest.raises(UserExit, match="exits " + HERE):
        buffer.get_samples(1)


def test_methods_of_actors_keep_their_signature_and_name():
    @exits_are_errors
    class Actor:
        def __init__(self) -> None:
            sys.exit(3)

        def work(self, number: int) -> int:
            """Works."""
            return number + 1

    assert (Actor.work.__name__, Actor.work.__doc__) == ("work", "Works.")
    assert Actor.work(None, 1) == 2  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        Actor()


def test_a_module_that_exits_when_it_is_imported_is_a_problem_of_the_flag(tmp_path):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"leaves\.py cannot be imported: SystemExit: 3"):
        load_function(f"{path}:f")
