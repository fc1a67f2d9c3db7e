"""Environments of four packages in one run of the real stack: their rewards, and the engine's log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.environments.run_tiny import environments
from examples.tiny.recipe import write_rows
from slime.environments.rollout import rows
from tests.e2e.running import metrics, run_train, values
from tests.unit.environments.test_nemo_gym import needs_package, serving_package

pytestmark = pytest.mark.e2e

for package in ("reasoning_gym", "verifiers", "mcp", "openenv"):
    pytest.importorskip(package, reason=f"pip install 'slime[{package.replace('_', '-')}]'")


def flags_for(model: str, directory: Path) -> list[Any]:
    """Two rollouts of four tasks."""
    return [
        *("--hf-checkpoint", model, "--label-key", "label", "--num-rollout", 2),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 6),
        *("--custom-generate-function-path", "slime.environments.rollout.generate"),
        *("--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--fp32", "--lr", "1e-4"),
        *("--sglang-context-length", 512, "--sglang-max-total-tokens", 16384),
        *("--save-debug-rollout-data", directory / "{rollout_id}.pt", "--output-dir", directory),
        *("--experiment-name", "run"),
    ]


@pytest.mark.slow
def test_rewards_of_four_packages_are_trained_on_with_the_probabilities_of_the_engine(tiny_task, tmp_path):
    """Two rollouts. Each draws one task of every environment, and evaluation plays one of them.

    ``environments`` starts counting_server.py at a free port.
    """
    with environments(tmp_path) as named:
        tasks = [row for name, options in named for row in rows(name, options, 0, 2)]
        data = write_rows(tmp_path / "train.jsonl", [tasks[i + k] for k in range(2) for i in (0, 2, 4, 6)])
        evaluation = ("--eval-prompt-data", "sums", f"{data}@[0:1]", "--eval-interval", 2)
        flags = [*flags_for(tiny_task.model, tmp_path), "--prompt-data", data, *evaluation]
        finished = run_train([*flags, "--n-samples-per-eval-prompt", 1], tmp_path)
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


@needs_package
def test_the_rewards_of_a_nemo_gym_server_are_trained_on(tiny_task, tmp_path):
    with serving_package("example_session_state_mgmt") as (url, examples):
        tasks = rows(f"nemo-gym:{examples}", {"url": url, "answer": "expected_count"}, 0, 4)
        data = write_rows(tmp_path / "train.jsonl", list(tasks) * 2)
        finished = run_train([*flags_for(tiny_task.model, tmp_path), "--prompt-data", data], tmp_path)
    assert finished.status == 0, finished.output[-4000:]
    records = metrics(tmp_path / "run")
    assert max(values(records, "train/train_rollout_logprob_abs_diff")) < 1e-4
    for rollout_id in range(2):
        samples = torch.load(tmp_path / f"{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == 8
        assert all(sample["reward"] in (0.0, 1.0) and sum(sample["loss_mask"]) > 0 for sample in samples)
