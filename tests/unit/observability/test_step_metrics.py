"""The cost of a step, the table of metrics, and profiles of the trainer."""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.board.curves import MetricFile
from slime.config.check.objective import _dumps
from slime.config.groups import RunConfig, add_group
from slime.data.sample import Sample
from slime.observability import metric_table
from slime.observability.arguments import OutputArgs, ProfileArgs
from slime.observability.metric_table import METRICS, MetricEntry, describe
from slime.observability.metric_utils import Work, perf_metrics, warn_if_mismatched
from slime.observability.profile_utils import TrainProfiler
from slime.observability.rollout_metrics import log_rollout_data
from slime.observability.trace_utils import trace_span
from slime.utils.errors import ConfigError
from tools.make_metrics_docs import PAGE, page


def test_times_make_rates() -> None:
    seconds = {"train": 6.0, "train_wait": 2.0, "actor_train": 4.0, "ref_log_probs": 1.0, "sync": 0.5, "rollout": 3.0}
    work = Work(num_tokens=800, forward_flops=8e12, num_ranks=2, num_synced_bytes=10**9)
    metrics = perf_metrics(seconds, work)
    assert metrics["perf/step_time"] == 8.0
    assert metrics["perf/wait_time_ratio"] == 0.25
    assert metrics["perf/update_weights_time"] == 0.5
    assert metrics["perf/update_weights_gb_per_s"] == 2.0
    assert metrics["perf/ref_log_probs_tflops"] == 4.0
    assert metrics["perf/actor_train_tflops"] == 3.0  # three times the forward pass in four times the time
    assert metrics["perf/actor_train_tok_per_s"] == 200.0
    assert "perf/log_probs_tflops" not in metrics
    assert "perf/update_weights_density" not in metrics
    differences = perf_metrics(seconds, Work(num_synced_bytes=300, changed_share=0.25))
    assert differences["perf/update_weights_density"] == 0.25
    assert differences["perf/update_weights_wire_bytes"] == 300.0
    assert perf_metrics({"rollout": 1.0}, Work()) == {"perf/rollout_time": 1.0}


def test_a_difference_outside_of_its_band_names_the_command_that_explains_it(caplog: pytest.LogCaptureFixture) -> None:
    name = "train_rollout_logprob_abs_diff"
    with caplog.at_level(logging.WARNING):
        warn_if_mismatched(3, [{name: 0.01}, {name: math.nan}, {}], Path("outputs/run"))
        assert not caplog.records
        warn_if_mismatched(3, [{name: 0.01}, {name: 0.5}], Path("outputs/run"))
    assert "slime doctor mismatch outputs/run --rollout 3" in caplog.text


def test_the_page_of_metrics_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    assert len({entry.name for entry in METRICS}) == len(METRICS)


def test_a_metric_is_one_row_for_the_page_and_the_board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = MetricEntry("train/toy", "how many toys", "toys", "sum", "it is tested")
    monkeypatch.setattr(metric_table, "METRICS", (*METRICS, row))
    assert "| `train/toy` | how many toys | toys | sum | it is tested |" in page()
    (tmp_path / "metrics.jsonl").write_text('{"step_key": "train/step", "train/step": 1, "train/toy": 3}\n')
    file = MetricFile(tmp_path / "metrics.jsonl", started=0.0)
    file.refresh()
    toy = {"x": [1.0], "y": [3.0], "unit": "toys", "meaning": "how many toys"}
    assert file.series("step") == {"train/toy": toy}


def test_all_metrics_of_a_rollout_are_in_the_table() -> None:
    args = Namespace(
        advantage_estimator="grpo",
        reward_key=None,
        rollout_num_gpus=2,
        rollout_max_response_len=8,
        n_samples_per_prompt=2,
        log_passrate=True,
        log_reward_category=None,
        log_multi_turn=True,
        log_correct_samples=True,
    )
    samples = []
    for i in range(4):
        sample = Sample(index=i, group_index=i // 2, tokens=[1] * 8, response_length=4, reward=float(i % 2 or i > 1))
        sample.loss_mask, sample.weight_versions = [1, 1, 0, 1], ["3", str(2 + i)]
        sample.non_generation_time = 0.5
        sample.metadata["round_number"] = 2
        with trace_span(sample, "sglang_generate") as span:
            span.update({"e2e_latency": 1.0, "queue_time": 0.1, "decode_throughput": 50.0})
        samples.append(sample)
    extra = {"rollout/dropped_tokens": 5, "rollout/stale_tokens": 2}
    metrics = log_rollout_data(5, args, samples, extra, 2.0)
    assert [name for name in metrics if describe(name) is None] == []
    assert metrics["rollout/wasted_tokens"] == 7
    assert metrics["rollout/masked_share"] == 0.25
    assert metrics["rollout/weight_version_lag/max"] == 3  # of the oldest: 2, 3, 3, 3
    assert metrics["rollout/weight_version_lag/mean"] == pytest.approx((3 + 2 + 2 + 2) / 4)
    assert describe("user/own") is None


def profiled(tmp_path: Path, *flags: str) -> TrainProfiler:
    parser = argparse.ArgumentParser()
    add_group(parser, ProfileArgs)
    args = parser.parse_args([*flags, "--tensorboard-dir", str(tmp_path / "profile")])
    return TrainProfiler(RunConfig.of(args), rank=1)


def run_rollouts(profiler: TrainProfiler, count: int) -> None:
    profiler.begin()
    for rollout_id in range(count):
        with profiler.section("train_log_probs"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        with profiler.section("train_actor"):
            torch.ones(4, 4).exp()
        profiler.end_rollout(rollout_id)


def operators(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("aten::")}


def test_without_flags_nothing_is_profiled(tmp_path: Path) -> None:
    run_rollouts(profiled(tmp_path), 3)
    assert not (tmp_path / "profile").exists()


def test_a_section_is_profiled_in_the_rollouts_between_start_and_end(tmp_path: Path) -> None:
    flags = ("--use-pytorch-profiler", "--profile-target", "train_log_probs", "--profile-step-start", "1")
    run_rollouts(profiled(tmp_path, *flags, "--profile-step-end", "3"), 4)
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name.split(".")[0] for file in files] == [f"train_log_probs_rollout_{i}_rank_1" for i in (1, 2)]
    assert "aten::mm" in operators(files[0])
    assert "aten::exp" not in operators(files[0])


def test_whole_rollouts_are_profiled_as_one_trace(tmp_path: Path) -> None:
    flags = ("--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2")
    run_rollouts(profiled(tmp_path, *flags), 4)
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name.startswith("train_overall_rank_1.")
    assert {"aten::mm", "aten::exp"} <= operators(file)


def test_a_recorder_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "memray", None)
    flags = ("--record-memory-history", "--memory-recorder", "memray", "--memory-snapshot-num-steps", "1")
    with pytest.raises(ConfigError, match="memray"):
        profiled(tmp_path, *flags, "--memory-snapshot-dir", str(tmp_path)).begin()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"profile_target": ["train_overall", "train_actor"]}, "one profiler at a time"),
        ({"profile_step_start": 3, "profile_step_end": 3}, "0 <= start < end"),
        ({"record_samples": -1}, "--record-samples -1"),
        ({"memory_recorder": "memray"}, "--memory-snapshot-num-steps"),
        ({}, None),
    ],
)
def test_flags_that_cannot_work_are_refused_before_the_run(change: dict[str, Any], problem: str | None) -> None:
    parser = argparse.ArgumentParser()
    for group in (ProfileArgs, OutputArgs):
        add_group(parser, group)
    args = parser.parse_args(["--use-pytorch-profiler"])
    vars(args).update(load_debug_rollout_data_subsample=None, **change)
    found = list(_dumps(args))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
