"""The asynchronous loop on the real stack: it overlaps, stays within its bound of staleness, and resumes exactly."""

from __future__ import annotations

import pytest

from tests.doc_commands import shown_flags
from tests.e2e.running import metrics, run_train, slime, values
from tests.e2e.test_loop import grpo_flags


@pytest.fixture(scope="module")
def resumed_run(tiny_task, tmp_path_factory):
    """Four rollouts, then the same command for seven."""
    output = tmp_path_factory.mktemp("async")
    flags = grpo_flags(
        *(tiny_task, output, "--async-buffer-size", 2, "--save", output / "checkpoints", "--save-interval", 4),
        *("--load", output / "checkpoints", "--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
    )
    runs = []
    for num_rollout in (4, 7):
        finished = run_train([*flags, "--num-rollout", num_rollout], output, script="train_async.py")
        assert finished.status == 0, finished.output[-4000:]
        runs.append(finished)
    return output, runs


def test_rollouts_are_made_by_older_weights_but_never_older_than_the_buffer_allows(resumed_run):
    output, _ = resumed_run
    lags = values(metrics(output / "run"), "rollout/weight_version_lag")
    assert len(lags) == 7
    assert lags[0] == lags[4] == 0  # a start and a resume begin with current weights
    assert max(lags) in (1, 2)


def test_no_prompt_is_lost_or_drawn_twice_although_rollouts_ran_ahead_of_the_checkpoint(resumed_run):
    import torch

    output, _ = resumed_run
    dumps = [torch.load(output / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in range(7)]
    drawn = [index for dump in dumps for index in sorted({sample["group_index"] for sample in dump})]
    assert drawn == list(range(7 * 16))


def test_the_reward_rises_off_policy_as_well(resumed_run):
    output, _ = resumed_run
    rewards = values(metrics(output / "run"), "rollout/raw_reward")
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1, rewards


def test_no_process_is_left_after_an_asynchronous_run(resumed_run):
    _, runs = resumed_run
    assert [run.survivors() for run in runs] == [[], []]


def test_generation_that_never_stops_stays_within_its_staleness_loses_no_prompt_and_is_made_again(tiny_task, tmp_path):
    import torch

    flags = grpo_flags(
        *(tiny_task, tmp_path, *shown_flags("docs/reproducibility.md", "--deterministic-mode")),
        *("--save", tmp_path / "checkpoints", "--save-interval", 2, "--load"),
        *(tmp_path / "checkpoints", "--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt"),
        *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
        *("--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout", "--max-weight-staleness", 2),
    )
    for num_rollout in (2, 3):
        finished = run_train([*flags, "--num-rollout", num_rollout], tmp_path, script="train_async.py")
        assert finished.status == 0, finished.output[-4000:]
        assert finished.survivors() == []
    samples = [torch.load(tmp_path / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in range(3)]
    for rollout_id, dump in enumerate(samples):
        oldest = min(int(version) for sample in dump for version in sample["weight_versions"])
        assert rollout_id - 2 <= oldest <= rollout_id
    drawn = [index for dump in samples for index in {sample["group_index"] for sample in dump}]
    assert len(drawn) == len(set(drawn)) == 3 * 16
    assert min(samples[2], key=lambda s: s["group_index"])["group_index"] < 3 * 16  # none was skipped at the restart
    status, output = slime("replay", tmp_path / "run", "--all")
    assert status == 0, output
    assert "3 rollouts, 4 weight versions compared" in output
