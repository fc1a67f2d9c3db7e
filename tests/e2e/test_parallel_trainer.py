"""A trainer whose ranks share a model, between real engines: four ranks as tensor-parallel pairs in two pipeline
stages, then the same rollouts on four ranks laid out otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags


@pytest.fixture(scope="module")
def sharded_run(tiny_task, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("sharded")
    flags = grpo_flags(
        *(tiny_task, output, "--num-rollout", 2, "--actor-num-gpus-per-node", 4),
        *("--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2),
        *("--check-weight-update-equal", "--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        *("--save-hf", output / "hf_{rollout_id}", "--save", output / "checkpoints", "--save-interval", 2),
    )
    result = run_train(flags, output)
    assert result.status == 0, result.output[-4000:]
    assert result.survivors() == []
    return output


def test_engines_get_the_whole_model_and_agree_with_the_trainer_on_every_token(sharded_run):
    differences = values(metrics(sharded_run / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert 0 < max(differences) < 1e-4, differences


def test_the_export_of_a_sharded_model_is_complete(sharded_run):
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        sharded_run / "hf_1", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_another_layout_computes_the_same_losses_from_the_same_rollouts(sharded_run, tiny_task, tmp_path):
    flags = grpo_flags(tiny_task, tmp_path, "--load-debug-rollout-data", sharded_run / "dump" / "{rollout_id}.pt")
    flags += ["--num-rollout", 2, "--actor-num-gpus-per-node", 4, "--context-parallel-size", 2]
    result = run_train(flags, tmp_path)
    assert result.status == 0, result.output[-4000:]
    for name in ("train/loss", "train/grad_norm", "train/kl_loss"):
        ours, theirs = (values(metrics(run / "run"), name) for run in (tmp_path, sharded_run))
        assert len(ours) == 2
        assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-6), name
