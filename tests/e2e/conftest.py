"""A run that nothing disturbed, for the tests of those that something did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import run_train
from tests.e2e.test_loop import grpo_flags

ROLLOUTS = 4


def exact_flags(task, output: Path, *more: Any) -> list[Any]:
    """Four rollouts that are the same bits every time, a checkpoint after every second one, everything written."""
    return grpo_flags(
        *(task, output, "--deterministic-mode", "--sglang-enable-deterministic-inference"),
        *("--lr-decay-style", "cosine", "--lr-decay-iters", 4, "--lr", "1e-3", "--min-lr", 0),
        *("--save", output / "checkpoints", "--load", output / "checkpoints", "--save-interval", 2),
        *("--save-hf", output / "hf_{rollout_id}"),
        *("--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        *("--num-rollout", ROLLOUTS, *more),
    )


def assert_same_run(whole: Path, other: Path) -> None:
    """Every prompt, every sampled token and every weight of the last checkpoint, bit for bit."""
    import torch
    from safetensors.torch import load_file

    for rollout_id in range(ROLLOUTS):
        expected, found = (
            torch.load(output / "dump" / f"{rollout_id}.pt", weights_only=True)["samples"] for output in (whole, other)
        )
        assert [sample["tokens"] for sample in expected] == [sample["tokens"] for sample in found]
    expected, found = (load_file(output / f"hf_{ROLLOUTS - 1}" / "model.safetensors") for output in (whole, other))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.fixture(scope="session")
def undisturbed_run(tiny_task, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    finished = run_train(exact_flags(tiny_task, output), output)
    assert finished.status == 0, finished.output[-4000:]
    return output
