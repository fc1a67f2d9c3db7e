"""Asynchronous runs in deterministic mode: each has one history, which can be executed again, continued and changed."""

from __future__ import annotations

import json
import re
from collections import defaultdict

import pytest

from slime.data.schedule import SCHEDULE, WEIGHTS, read_weights
from slime.doctor.ledger import examine_ledger
from tests.doc_commands import shown_flags
from tests.e2e.running import Finished, everything, exit_status, run_train, slime, start_train
from tests.e2e.test_loop import grpo_flags


@pytest.fixture(scope="module")
def recorded(tiny_task, tmp_path_factory):
    """An asynchronous run of six rollouts, of which two may be under way beside the trainer: its folder.

    Newer weights continue the responses that the end of a rollout aborts. A checkpoint follows every second one.
    """
    output = tmp_path_factory.mktemp("recorded")
    exact = shown_flags("docs/reproducibility.md", "--deterministic-mode")
    flags = grpo_flags(
        *(tiny_task, output, *exact, "--async-buffer-size", 2, "--num-rollout", 6, "--record-samples", 128),
        *("--save", output / "checkpoints", "--save-interval", 2, "--partial-rollout"),
        *("--over-sampling-batch-size", 24, "--sglang-max-running-requests", 44),
    )
    finished = run_train(flags, output, script="train_async.py")
    assert finished.status == 0, finished.output[-4000:]
    return output / "run"


def test_the_schedule_of_an_asynchronous_run_is_executed_again_to_the_same_weights(recorded):
    status, output = slime("replay", recorded, "--all")
    assert status == 0, output
    assert "6 rollouts, 7 weight versions compared" in output
    assert re.findall(r"first (\w+) that differs +none", output) == ["token", "loss", "weight"]


def test_a_branch_without_changed_flags_is_the_run_and_with_another_learning_rate_names_what_differs(recorded):
    status, output = slime("branch", recorded, "--at", 2)
    assert status == 0, output
    assert "4 rollouts, 5 weight versions compared" in output
    status, output = slime("branch", recorded, "--at", 2, "--name", "slower", "--", "--lr", "1e-3", "--min-lr", "1e-3")
    assert status == 1, output
    found = dict(re.findall(r"first (\w+) that differs +(\w+ \w+)", output))
    # rollout 2 is trained on the same tokens, with the same loss, before the weights differ
    assert found["weight"] == "version 3"
    assert found["loss"] == "step 3"
    # of the first rollout that version 3 generated
    assert re.search(r"first token that differs +rollout [45], sample \d+, token \d+: recorded \d+, now \d+", output)


def test_a_staleness_of_zero_gives_the_weights_of_the_synchronous_run(tiny_task, tmp_path):
    exact = shown_flags("docs/reproducibility.md", "--deterministic-mode")
    function = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    weights = []
    for script, more in (
        ("train.py", []),
        ("train_async.py", ["--rollout-function-path", function, "--max-weight-staleness", 0]),
    ):
        flags = grpo_flags(tiny_task, tmp_path / script, *exact, "--num-rollout", 2, *more)
        (tmp_path / script).mkdir()
        finished = run_train(flags, tmp_path / script, script=script)
        assert finished.status == 0, finished.output[-4000:]
        weights.append(read_weights(tmp_path / script / "run" / WEIGHTS))
    assert len(weights[0]) == 3
    assert weights[0] == weights[1]


@pytest.fixture(scope="module")
def killed(tiny_task, tmp_path_factory):
    """A run of six rollouts that never stops to generate, started again after its driver was killed, three times.

    The first two deaths come before the first checkpoint, the third while it is written: the folder and all logs.
    """
    output = tmp_path_factory.mktemp("killed")
    flags = grpo_flags(
        *(tiny_task, output, *shown_flags("docs/reproducibility.md", "--deterministic-mode"), "--num-rollout", 6),
        *("--save", output / "checkpoints", "--load", output / "checkpoints", "--save-interval", 4),
        *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
        *("--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout", "--max-weight-staleness", 2),
    )
    logs = []
    for moment in ("generate 3", "sync 3", "save 3"):
        log = output / f"log of {moment}"
        process, mark = start_train(flags, output, log, "tests/e2e/dying_train_async.py", DIES_IN=moment)
        assert exit_status(process, log) == -9
        assert Finished(-9, "", mark).survivors() == []
        logs.append(everything(log, output / "run" / "run.log"))
    finished = run_train(flags, output, script="train_async.py")
    assert finished.status == 0, finished.output[-4000:]
    return output, [*logs, finished.output]


def test_a_run_that_was_killed_three_times_has_one_history(killed):
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


def test_a_run_that_was_killed_three_times_is_executed_again_to_the_same_weights(killed):
    output, _ = killed
    status, text = slime("replay", output / "run", "--all")
    assert status == 0, text
    assert "6 rollouts, 7 weight versions compared" in text
