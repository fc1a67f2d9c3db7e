"""A bf16 engine reports its choices of experts, and training uses the same ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.moe_model import make_moe_model
from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags


@pytest.fixture(scope="module")
def runs(tiny_task, tmp_path_factory) -> dict[str, Path]:
    """Two rollouts with replay, then training alone, without replay, on the first of them."""
    model = make_moe_model(tiny_task, tmp_path_factory.mktemp("moe"))
    task = dataclasses.replace(tiny_task, model=str(model))
    outputs = {name: tmp_path_factory.mktemp(name) for name in ("with", "without")}
    dump = outputs["with"] / "dump" / "{rollout_id}.pt"

    def train(name: str, *more: Any) -> None:
        flags = grpo_flags(task, outputs[name], "--rollout-max-response-len", 24, *more)
        flags[flags.index("--fp32")] = "--bf16"
        result = run_train([*flags, "--expert-model-parallel-size", 2], outputs[name])
        assert result.status == 0, result.output[-4000:]

    saved = ("--save-debug-rollout-data", dump)
    train("with", "--num-rollout", 2, "--use-rollout-routing-replay", "--check-weight-update-equal", *saved)
    train("without", "--num-rollout", 1, "--load-debug-rollout-data", dump)
    return outputs


def test_every_sample_carries_the_choices_for_all_its_tokens_but_the_last(runs):
    import torch

    for rollout_id in range(2):
        samples = torch.load(runs["with"] / "dump" / f"{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == 16 * 8
        for sample in samples:
            assert sample["rollout_routed_experts"].shape == (len(sample["tokens"]) - 1, 2, 2)


def test_with_the_engines_experts_the_trainer_is_closer_to_its_log_probs(runs):
    mean, largest = (
        {run: values(metrics(path / "run"), name)[0] for run, path in runs.items()}
        for name in ("train/train_rollout_logprob_abs_diff", "rollout/logprob_abs_diff_max")
    )
    assert 0 < mean["with"] < mean["without"], mean
    assert largest["with"] < 0.5 * largest["without"], largest
