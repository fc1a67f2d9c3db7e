"""Generate functions for a whole group, groups that come back from an earlier rollout, and slow hooks."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from slime.data.sample import Sample
from slime.hooks import takes_group
from slime.rollout.collect import BatchHooks, Drops
from slime.rollout.custom_generate import GenerateFunction, apply_rollout_sample_hooks
from slime.rollout.failures import Attempts
from slime.rollout.sglang_rollout import generate_and_rm, generate_and_rm_group
from slime.utils.async_utils import Deadline, run
from slime.utils.errors import DataError
from tests.unit.rollout.fake_engine import make_args

Status = Sample.Status


async def one_more_token(args, samples):
    for sample in samples:
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0], text="9")
        sample.status = Status.COMPLETED
    return samples


async def aborted_once(args, samples):
    is_first = not any("failed_attempts" in sample.metadata for sample in samples)
    await one_more_token(args, samples)
    samples[0].status = Status.ABORTED if is_first else Status.COMPLETED
    return samples


async def ended(args, samples):
    for sample in samples:
        sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [0, 0], 1, [0], [0.0]
        sample.status, sample.reward, sample.remove_sample = Status.ABORTED, 0, True
        sample.metadata["abort_reason"] = "wall_clock_timeout"
    return samples


def sample_with(index, status, reward=None, num_tokens=1):
    sample = Sample(index=index, group_index=0, prompt="1+1=", label="2", tokens=[1])
    if num_tokens:
        sample.append_response_tokens(tokens=[7] * num_tokens, log_probs=[-1.0] * num_tokens, text="7")
    sample.status, sample.reward = status, reward
    return sample


@pytest.fixture
def finish(tiny_task):
    """``finish(group, function, **flags)``: the group when it is done."""

    def make(group, function="one_more_token", **flags):
        path = f"{__file__}:{function}"
        args = make_args(tiny_task.model, 1, custom_generate_function_path=path, partial_rollout=True, **flags)
        return run(generate_and_rm_group(args, group, {"max_new_tokens": 8}))

    return make


def test_finished_members_of_a_group_are_not_generated_again(finish):
    done, begun = sample_with(0, Status.COMPLETED, reward=0.25), sample_with(1, Status.ABORTED)
    group = finish([done, begun], mask_offpolicy_in_partial_rollout=True)
    assert [sample.response_length for sample in group] == [1, 2]
    assert group[0].reward == 0.25
    assert group[1].reward is not None
    assert group[1].loss_mask == [0, 1]  # the first token is of older weights
    assert group[0].loss_mask == [1]


def test_a_group_that_finished_while_its_rollout_ended_only_gets_its_rewards(finish):
    group = finish([sample_with(0, Status.COMPLETED), sample_with(1, Status.TRUNCATED)])
    assert [sample.response_length for sample in group] == [1, 1]
    assert all(sample.reward is not None for sample in group)


def test_rows_of_an_execution_come_back_as_rows(finish):
    rows = [sample_with(0, Status.COMPLETED, reward=1.0), sample_with(0, Status.ABORTED)]
    group = finish([rows, sample_with(1, Status.PENDING, num_tokens=0)])
    assert [[row.response_length for row in group[0]], group[1].response_length] == [[1, 2], 1]
    assert all(sample.reward is not None for sample in [*group[0], group[1]])


def test_an_unexpected_abort_of_a_group_is_generated_again(finish):
    group = finish([sample_with(i, Status.PENDING, num_tokens=0) for i in range(2)], "aborted_once")
    assert [(sample.status, sample.response_length) for sample in group] == [(Status.COMPLETED, 1)] * 2
    assert group[0].metadata["failed_attempts"] == 1


def test_a_sample_that_a_function_ended_itself_is_a_masked_row_and_no_failure(finish):
    (sample,) = finish([sample_with(0, Status.PENDING, num_tokens=0)], "ended")
    assert (sample.status, sample.reward, sample.tokens, sample.loss_mask) == (Status.ABORTED, 0, [0, 0], [0])
    assert sample.metadata == {"abort_reason": "wall_clock_timeout"}


def test_a_finished_sample_without_a_reward_gets_one(tiny_task):
    args = make_args(tiny_task.model, 1, partial_rollout=True)
    sample = run(generate_and_rm(args, sample_with(0, Status.COMPLETED), {"max_new_tokens": 8}))
    assert sample.reward in (0, 1)


def annotated(args, batch: list[Sample]): ...
def as_text(args, batch: list[Sample], evaluation=False): ...
def of_both(args, sample: Sample | list[Sample], sampling_params): ...
def for_one(args, sample: Sample, sampling_params): ...


def test_a_function_for_groups_is_known_by_its_second_parameter():
    assert [takes_group(function) for function in (annotated, as_text, of_both, for_one, one_more_token)] == [
        *(True, True, False, False, True)
    ]


entered, may_return = threading.Event(), threading.Event()


def waits(args, sample, **kwargs):
    entered.set()
    assert may_return.wait(120)
    return sample


@pytest.mark.parametrize("what", ["hook", "filter"])
def test_a_plain_function_that_is_slow_does_not_stop_the_others(what):
    entered.clear()
    may_return.clear()
    args = make_args("", 1, rollout_sample_hook_path=[f"{__name__}.waits"])
    sample = Sample()

    async def main():
        stop = Deadline(600, "the slow function to be called")
        slow = apply_rollout_sample_hooks(args, sample) if what == "hook" else BatchHooks(args, waits).judge(sample)
        task = asyncio.create_task(slow)
        while not entered.is_set():
            stop.check()
            await asyncio.sleep(0)
        may_return.set()  # only a loop that still turns comes here
        return await task

    assert run(main()) is not None


def test_a_filter_that_drops_everything_has_an_end():
    drops = Drops(target=1)
    for _ in range(100):
        drops.add([Sample(response_length=2)], "too easy")
    with pytest.raises(DataError, match="dropped 101 groups for a batch of 1"):
        drops.add([Sample(response_length=2)], "too easy")
    assert drops.metrics()["rollout/dynamic_filter/drop_too easy"] == 101
    assert drops.metrics()["rollout/dropped_tokens"] == 202


async def hangs(args, sample, sampling_params):
    await asyncio.Event().wait()


async def group_hangs(args, samples, sampling_params):
    await asyncio.Event().wait()


@pytest.mark.parametrize("function", ["hangs", "group_hangs"])
def test_a_function_that_hangs_is_ended_and_its_samples_are_given_up_after_their_attempts(finish, function):
    pair = [sample_with(i, Status.PENDING, num_tokens=0) for i in range(2)]
    group = finish(pair, function, custom_generate_timeout=0.1, max_sample_retries=1)
    for sample in group:
        failure = sample.metadata["failure"]
        assert (sample.status, failure["type"]) == (Status.FAILED, "TimeoutError")
        assert f"{function} raised on sample" in failure["message"]
        assert "in 2 attempts (--max-sample-retries 1)" in failure["message"]
        assert "within 0.1 s: fix it, or raise --custom-generate-timeout" in failure["message"]


def test_a_thread_that_is_too_late_does_not_write_into_the_next_attempt():
    begun, is_through, has_written = [], threading.Event(), threading.Event()

    def late_at_first(args, sample, sampling_params):
        begun.append(sample)
        is_late = len(begun) == 1
        if is_late:
            is_through.wait(120)
        sample.append_response_tokens(tokens=[7], log_probs=[-1.0], text="late" if is_late else "in time")
        if is_late:
            has_written.set()
        return sample

    source, args = sample_with(0, Status.PENDING, num_tokens=0), SimpleNamespace(custom_generate_timeout=2.0)

    async def generate():
        for attempt in Attempts([source], retries=1, what="late"):
            with attempt:
                return await GenerateFunction(args, late_at_first).of_one(source, {}, evaluation=False)

    sample = run(generate())
    is_through.set()
    assert has_written.wait(120)
    assert (sample.response_length, sample.response, sample.metadata["failed_attempts"]) == (1, "in time", 1)
    assert source.response_length == 0
