"""The real stack with ``--train-backend fsdp`` on a CPU: Ray, sharded models of transformers, SGLang, its router."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doc_commands import shown_flags
from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags

_FSDP = shown_flags("docs/fsdp.md", "--train-backend fsdp")


@pytest.fixture(scope="module")
def fsdp_run(tiny_task, tmp_path_factory) -> Path:
    """Two ranks that share every sequence, and one engine. Every weight is compared after every sync."""
    output = tmp_path_factory.mktemp("fsdp")
    flags = grpo_flags(
        *(tiny_task, output, *_FSDP, "--num-rollout", 5, "--check-weight-update-equal"),
        *("--save", output / "checkpoints", "--save-interval", 5, "--save-hf", output / "hf_{rollout_id}"),
    )
    result = run_train(flags, output)
    assert result.status == 0, result.output[-4000:]
    assert result.survivors() == []
    return output


def test_a_sharded_model_learns_and_agrees_with_the_engine_on_every_token(fsdp_run):
    records = metrics(fsdp_run / "run")
    rewards = values(records, "rollout/raw_reward")
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0] + 0.05, rewards
    differences = values(records, "train/train_rollout_logprob_abs_diff")
    assert 0 < max(differences) < 1e-4, differences
    assert (fsdp_run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert (fsdp_run / "hf_4" / "model.safetensors").is_file()
