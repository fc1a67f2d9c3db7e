"""An offline run of an example as a reader starts it: it learns what its README says.

A warm start and a run of GRPO with the real stack and a Python sandbox.
"""

from __future__ import annotations

import pytest
import torch

from tests.e2e.running import metrics, run_train, values

USED = "<interpreter>"
"""Text in a response that used the tool."""


@pytest.mark.slow
def test_a_tiny_model_learns_to_use_a_python_sandbox(tmp_path):
    """Right answers and tool calls increase. The tool's words are in the samples and are not trained on."""
    output = tmp_path / "retool"
    finished = run_train(["--output", output], tmp_path, script="examples/retool/run_tiny.py")
    assert finished.status == 0, finished.output[-4000:]
    assert "reward of a response: " in finished.output.splitlines()[-1]
    assert finished.survivors() == []
    records = metrics(output / "grpo")
    rewards = values(records, "rollout/raw_reward")
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards
    assert max(values(records, "train/train_rollout_logprob_abs_diff")) < 1e-4
    first, last = (
        torch.load(output / "samples" / f"{rollout_id}.pt", weights_only=True)["samples"]
        for rollout_id in (0, len(rewards) - 1)
    )
    calls = [sum(USED in sample["response"] for sample in batch) for batch in (first, last)]
    assert calls[1] > calls[0] > 0
    for sample in last:
        assert (0 in sample["loss_mask"]) == (USED in sample["response"])
