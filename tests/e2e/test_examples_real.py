"""Two offline runs of the examples as a reader starts them, beside each other: they learn what their READMEs say.

Each is a warm start and a run of GRPO with the real stack, one with a search server and one with a Python sandbox.
"""

from __future__ import annotations

import pytest
import torch

from tests.e2e.running import Finished, exit_status, kill_marked, metrics, start_train, values

USED = {"search-r1": "<information>", "retool": "<interpreter>"}
"""Example -> text in a response that used the example's tool."""


@pytest.mark.slow
@pytest.mark.alone
def test_tiny_models_learn_to_use_a_search_server_and_a_python_sandbox(tmp_path):
    started = {}
    for name in USED:
        log = tmp_path / f"{name}.log"
        flags = ["--output", tmp_path / name]
        started[name] = (*start_train(flags, tmp_path, log, f"examples/{name}/run_tiny.py"), log)
    try:
        for name, (process, mark, log) in started.items():
            status = exit_status(process, log)
            finished = Finished(status, log.read_text(), mark)
            assert status == 0, f"{name}:\n{finished.output[-4000:]}"
            assert "reward of a response: " in finished.output.splitlines()[-1]
            assert finished.survivors() == []
            assert_learned(tmp_path / name, USED[name])
    finally:
        for process, mark, _ in started.values():
            kill_marked(mark, "")  # nothing is left of a run that came to its end
            process.wait()


def assert_learned(output, tag: str) -> None:
    """Right answers and tool calls increase. The tool's words are in the samples and are not trained on."""
    records = metrics(output / "grpo")
    rewards = values(records, "rollout/raw_reward")
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards
    assert max(values(records, "train/train_rollout_logprob_abs_diff")) < 1e-4
    first, last = (samples(output, rollout_id) for rollout_id in (0, len(rewards) - 1))
    calls = [sum(tag in sample["response"] for sample in batch) for batch in (first, last)]
    assert calls[1] > calls[0] > 0
    for sample in last:
        assert (0 in sample["loss_mask"]) == (tag in sample["response"])


def samples(output, rollout_id: int) -> list[dict]:
    return torch.load(output / "samples" / f"{rollout_id}.pt", weights_only=True)["samples"]
