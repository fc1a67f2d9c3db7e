"""Asynchronous runs: they overlap, stay within their bound of staleness, and resume exactly.

In deterministic mode each has one history, which can be executed again, continued and changed.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.data.ledger import examine_ledger
from slime.data.schedule import SCHEDULE, WEIGHTS
from tests.doc_commands import shown_flags
from tests.e2e.running import Finished, everything, exit_status, metrics, run_train, slime, start_train, values
from tests.e2e.test_loop import grpo_flags


@pytest.fixture(scope="module")
def recorded(tiny_task, tmp_path_factory):
    """An asynchronous run, of which two rollouts may be under way beside the trainer: its folder.

    Four rollouts, then the same command for six. Newer weights continue the responses that the end of a rollout aborts.
    A checkpoint follows every second rollout.
    """
    output = tmp_path_factory.mktemp("recorded")
    exact = shown_flags("docs/reproducibility.md", "--deterministic-mode")
    flags = grpo_flags(
        *(tiny_task, output, *exact, "--async-buffer-size", 2, "--record-samples", 128, "--partial-rollout"),
        *("--save", output / "checkpoints", "--load", output / "checkpoints", "--save-interval", 2),
        *("--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        *("--over-sampling-batch-size", 24, "--sglang-max-running-requests", 44, "--lr", "1e-2", "--min-lr", "1e-2"),
    )
    for num_rollout in (4, 6):
        finished = run_train([*flags, "--num-rollout", num_rollout], output, script="train_async.py")
        assert finished.status == 0, finished.output[-4000:]
        assert finished.survivors() == []
    return output / "run"


def samples_of(output: Path) -> list[list[dict[str, Any]]]:
    """The samples of each of the six rollouts. None may have a prompt of another one."""
    dumps = [torch.load(output / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in range(6)]
    drawn = [index for dump in dumps for index in {sample["group_index"] for sample in dump}]
    assert len(drawn) == len(set(drawn)) == 6 * 16
    return dumps


def test_rollouts_are_made_by_older_weights_but_never_older_than_the_buffer_allows(recorded):
    lags = values(metrics(recorded), "rollout/weight_version_lag")
    assert len(lags) == 6
    assert lags[0] == lags[4] == 0  # a start and a resume begin with current weights
    assert max(lags) in (1, 2)


def test_no_prompt_is_lost_or_drawn_twice_although_rollouts_ran_ahead_of_the_checkpoint(recorded):
    samples_of(recorded.parent)
    assert examine_ledger(recorded.parent / "checkpoints") == 0


def test_the_reward_rises_off_policy_as_well(recorded):
    rewards = values(metrics(recorded), "rollout/raw_reward")
    # all rollouts draw with the same seeds, so only the weights make a difference
    assert sum(rewards[-2:]) / 2 > 2 * rewards[0] > 0, rewards


def test_the_schedule_of_an_asynchronous_run_is_executed_again_to_the_same_weights(recorded):
    status, output = slime("replay", recorded, "--all")
    assert status == 0, output
    assert "6 rollouts, 7 weight versions compared" in output
    assert re.findall(r"first (\w+) that differs +none", output) == ["token", "loss", "weight"]


def test_a_branch_with_another_learning_rate_is_the_run_until_its_first_step_and_names_what_differs(recorded):
    status, output = slime("branch", recorded, "--at", 2, "--name", "slower", "--", "--lr", "5e-3", "--min-lr", "5e-3")
    assert status == 1, output
    assert "4 rollouts, 5 weight versions compared" in output
    found = dict(re.findall(r"first (\w+) that differs +(\w+ \w+)", output))
    # rollout 2 is trained on the same tokens, with the same loss, before the weights differ
    assert found["weight"] == "version 3"
    assert found["loss"] == "step 3"
    # of the first rollout that version 3 generated
    assert re.search(r"first token that differs +rollout [45], sample \d+, token \d+: recorded \d+, now \d+", output)


@pytest.fixture(scope="module")
def killed(tiny_task, tmp_path_factory):
    """A run of six rollouts that never stops to generate, started again after its driver was killed, twice.

    The first death comes before the first checkpoint, the second while it is written: the folder and all logs.
    """
    output = tmp_path_factory.mktemp("killed")
    flags = grpo_flags(
        *(tiny_task, output, *shown_flags("docs/reproducibility.md", "--deterministic-mode"), "--num-rollout", 6),
        *("--save", output / "checkpoints", "--load", output / "checkpoints", "--save-interval", 4),
        *("--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
        *("--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout", "--max-weight-staleness", 2),
    )
    logs = []
    for moment in ("sync 3", "save 3"):
        log = output / f"log of {moment}"
        process, mark = start_train(flags, output, log, "tests/e2e/dying_train_async.py", DIES_IN=moment)
        assert exit_status(process, log) == -9
        assert Finished(-9, "", mark).survivors() == []
        logs.append(everything(log, output / "run" / "run.log"))
    finished = run_train(flags, output, script="train_async.py")
    assert finished.status == 0, finished.output[-4000:]
    assert finished.survivors() == []
    return output, [*logs, finished.output]


def test_a_run_that_was_killed_twice_has_one_history(killed):
    output, logs = killed
    known = defaultdict(list)
    for line in map(json.loads, (output / "checkpoints" / "rollout" / WEIGHTS).read_text().splitlines()):
        if "hash" in line:
            known[line["version"]].append((line["hash"], line["tensors"]))
    assert list(known) == list(range(7))
    repeated = [version for version, weights in known.items() if len(weights) > 1]
    assert {1, 2} <= set(repeated)
    assert [version for version in repeated if len(set(known[version])) > 1] == []
    batches = defaultdict(set)
    for line in map(json.loads, (output / "checkpoints" / "rollout" / SCHEDULE).read_text().splitlines()):
        if "batch" in line:
            batches[line["batch"]].add(json.dumps(line["samples"]))
    # those that the trainer had taken at the first death: the journal may lack the next one
    assert [rollout_id for rollout_id in range(2) if len(batches[rollout_id]) > 1] == []
    assert "rollout 1 was finished before the last start ended" in logs[1]
    assert "not the same history" not in "".join(logs)
    assert examine_ledger(output / "checkpoints") == 0


def test_generation_that_never_stops_stays_within_its_staleness_and_loses_no_prompt_at_a_restart(killed):
    for rollout_id, dump in enumerate(samples_of(killed[0])):
        oldest = min(int(version) for sample in dump for version in sample["weight_versions"])
        assert rollout_id - 2 <= oldest <= rollout_id
        # none is skipped: those of the aborted groups come first
        assert min(sample["group_index"] for sample in dump) < 6 * 16


def test_a_run_that_was_killed_twice_is_executed_again_to_the_same_weights(killed):
    output, _ = killed
    status, text = slime("replay", output / "run", "--all")
    assert status == 0, text
    assert "6 rollouts, 7 weight versions compared" in text
