"""In deterministic mode a run that was stopped and started again is bit for bit the run that was not."""

from __future__ import annotations

import pytest

from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags


@pytest.fixture(scope="module")
def both_runs(tiny_task, tmp_path_factory):
    """Four rollouts at once; two, a stop, and two more."""
    outputs = []
    for name, stops in (("whole", (4,)), ("resumed", (2, 4))):
        output = tmp_path_factory.mktemp(name)
        flags = grpo_flags(
            *(tiny_task, output, "--deterministic-mode", "--sglang-enable-deterministic-inference"),
            *("--lr-decay-style", "cosine", "--lr-decay-iters", 4, "--lr", "1e-3", "--min-lr", 0),
            *("--save", output / "checkpoints", "--load", output / "checkpoints", "--save-interval", 2),
            *(
                "--save-hf",
                output / "hf_{rollout_id}",
                "--save-debug-rollout-data",
                output / "dump" / "{rollout_id}.pt",
            ),
        )
        for num_rollout in stops:
            finished = run_train([*flags, "--num-rollout", num_rollout], output)
            assert finished.status == 0, finished.output[-4000:]
        outputs.append(output)
    return outputs


def test_data_order_and_sampled_tokens_are_the_same(both_runs):
    import torch

    for rollout_id in range(4):
        whole, resumed = (
            torch.load(output / "dump" / f"{rollout_id}.pt", weights_only=True)["samples"] for output in both_runs
        )
        assert [sample["tokens"] for sample in whole] == [sample["tokens"] for sample in resumed]


def test_weights_after_the_last_rollout_are_equal_bit_for_bit(both_runs):
    import torch
    from safetensors.torch import load_file

    whole, resumed = (load_file(output / "hf_3" / "model.safetensors") for output in both_runs)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_losses_gradient_norms_and_learning_rates_are_the_same_numbers(both_runs):
    whole, resumed = (metrics(output / "run") for output in both_runs)
    for name in ("train/loss", "train/grad_norm", "train/lr-pg_0"):
        assert values(whole, name) == values(resumed, name)
