"""Environments of four packages in one run of the real stack: their rewards, and the engine's log-probs."""

from __future__ import annotations

import pytest
import torch

from examples.environments.run_tiny import environments
from examples.tiny.recipe import write_rows
from slime.environments.rollout import rows
from tests.e2e.running import metrics, run_train, values

pytestmark = pytest.mark.e2e

for package in ("reasoning_gym", "verifiers", "mcp", "openenv"):
    pytest.importorskip(package, reason=f"pip install 'slime[{package.replace('_', '-')}]'")


@pytest.mark.slow
def test_rewards_of_four_packages_are_trained_on_with_the_probabilities_of_the_engine(tiny_task, tmp_path):
    """Two rollouts. Each draws one task of every environment, and evaluation plays one of them.

    ``environments`` starts counting_server.py at a free port.
    """
    flags = [
        *("--hf-checkpoint", tiny_task.model, "--label-key", "label", "--num-rollout", 2),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 6),
        *("--custom-generate-function-path", "slime.environments.rollout.generate"),
        *("--eval-interval", 2, "--n-samples-per-eval-prompt", 1),
        *("--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--fp32", "--lr", "1e-4"),
        *("--sglang-context-length", 256, "--sglang-max-total-tokens", 16384),
        *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt", "--output-dir", tmp_path),
        *("--experiment-name", "run"),
    ]
    with environments(tmp_path) as named:
        tasks = [row for name, options in named for row in rows(name, options, 0, 2)]
        data = write_rows(tmp_path / "train.jsonl", [tasks[i + k] for k in range(2) for i in (0, 2, 4, 6)])
        flags += ["--prompt-data", data, "--eval-prompt-data", "sums", f"{data}@[0:1]"]
        finished = run_train(flags, tmp_path)
    assert finished.status == 0, finished.output[-4000:]
    assert finished.survivors() == [], "a server of an episode is left"
    records = metrics(tmp_path / "run")
    differences = values(records, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert values(records, "eval/sums")
    for rollout_id in range(2):
        samples = torch.load(tmp_path / f"{rollout_id}.pt", weights_only=True)["samples"]
        assert {sample["metadata"]["environment"] for sample in samples} == {name for name, _ in named}
        assert {sample["metadata"]["task"] for sample in samples} == {rollout_id}
        assert all(0.0 <= sample["reward"] <= 1.0 for sample in samples)
        assert all(sum(sample["loss_mask"]) > 0 for sample in samples)
