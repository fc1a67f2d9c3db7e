"""An evaluation and a rollout at the same time: neither ends, counts or names the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from slime.data.sample import Sample, iter_samples
from slime.rollout.custom_generate import set_current_rollout_id, set_evaluated_rollout_id
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.eval_config import build_eval_datasets
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from tests.limits import unloaded_time
from tests.unit.rollout.fake_engine import FakeEngine, completion, make_args


def note(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    sample.metadata["seen_by_hook"] = (rollout_id, evaluation)


@pytest.mark.parametrize("partial", [False, True])
def test_the_end_of_a_rollout_does_not_touch_an_evaluation_that_runs_beside_it(
    engine: Callable[..., FakeEngine], tiny_task: Any, partial: bool
) -> None:
    evaluates, is_trained = threading.Event(), threading.Event()

    def answer(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        if payload["sampling_params"]["temperature"] == 0.0:
            evaluates.set()
            is_trained.wait(120)  # the evaluation is under way until the rollout is over
            return 200, completion(payload, [7])
        if number % 5 == 4:
            server.aborted.wait(120)  # what over-sampling leaves running
            return 200, completion(payload, [5], reason="abort")
        return 200, completion(payload, [5, 6])

    server = engine(answer)
    args = make_args(tiny_task.model, server.port, prompt_data=tiny_task.train)
    args.apply_chat_template, args.rollout_max_prompt_len = True, None
    args.over_sampling_batch_size, args.partial_rollout = 4, partial
    args.eval_prompt_data, args.eval_temperature = ["a", f"{tiny_task.eval}@[:3]"], 0.0
    args.rollout_sample_hook_path = [f"{__file__}:note"]
    args.eval_datasets = build_eval_datasets(args)
    results: list[Any] = []
    set_evaluated_rollout_id(7)
    set_current_rollout_id(8)
    try:
        evaluation = threading.Thread(target=lambda: results.append(generate_rollout(args, 7, None, evaluation=True)))
        evaluation.start()
        assert evaluates.wait(120)
        output = generate_rollout(args, 8, RolloutDataSourceWithBuffer(args))
        assert GenerateState(args).num_evaluations == 1
        is_trained.set()
        evaluation.join(120)
        assert [sample.tokens[-1] for sample in iter_samples(output.samples)] == [6] * 4
        assert [sample.tokens[-1] for sample in results[0].data["a"]["samples"]] == [7] * 3
        assert not any("failed_attempts" in s.metadata for s in results[0].data["a"]["samples"])
        assert {"abort_all": True} not in server.aborts
        assert {s.metadata["seen_by_hook"] for s in iter_samples(output.samples)} == {(8, False)}
        assert {s.metadata["seen_by_hook"] for s in results[0].data["a"]["samples"]} == {(7, True)}
        assert GenerateState(args).num_evaluations == 0
        assert not GenerateState(args).training
    finally:
        is_trained.set()
        set_current_rollout_id(None)
        set_evaluated_rollout_id(None)


def test_without_an_evaluation_the_end_of_a_rollout_empties_the_engines(
    engine: Callable[..., FakeEngine], tiny_task: Any
) -> None:
    quick: list[Any] = []

    def answer(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        """At once for two prompts, when it is aborted for the others."""
        with server.lock:
            if len(quick) < 2 and payload["input_ids"] not in quick:
                quick.append(payload["input_ids"])
        if payload["input_ids"] not in quick:
            server.aborted.wait(120)
        return 200, completion(payload, [5])

    server = engine(answer)
    args = make_args(tiny_task.model, server.port, prompt_data=tiny_task.train)
    args.apply_chat_template, args.rollout_max_prompt_len, args.over_sampling_batch_size = True, None, 4
    started = unloaded_time()
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {"abort_all": True} in server.aborts
    assert unloaded_time() - started < 8
