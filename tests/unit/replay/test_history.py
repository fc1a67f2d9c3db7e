"""Two recorded histories are compared: the first token, loss and weight that differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from slime.data.ledger import LEDGER
from slime.data.schedule import BRANCH, SCHEDULE, WEIGHTS, Planned, Schedule, WeightHistory, Weights, read_schedule
from slime.observability.run_info import FILE, RunInfo
from slime.replay import history
from slime.replay.history import History, compare, replay_all, replay_argv
from slime.utils.errors import DataError

SAME = History(
    Path("run"),
    {0: [Planned(0, 0, 11, ((0, 8),)), Planned(0, 1, 12, ((0, 8),))], 1: [Planned(1, 2, 13, ((0, 3), (1, 8)))]},
    {0: Weights("h0", "ab", "0" * 16), 1: Weights("h1", "ab", "1" * 16)},
    {0: 0.5, 1: 0.25},
)


def test_equal_histories_are_equal_also_if_one_is_longer(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(SAME, replace(SAME, batches={0: SAME.batches[0]})) == 0
    assert "1 rollouts, 2 weight versions compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"batches": {1: [Planned(1, 2, 99, ((0, 8),))]}},
            "token that differs     rollout 1, sample 2 (its tokens are",
        ),
        ({"batches": {0: SAME.batches[0][:1]}}, "rollout 0: recorded are 2 samples, now there are 1"),
        ({"losses": {0: 0.5, 1: 0.75}}, "loss that differs      step 1: recorded 0.25, now 0.75"),
        ({"weights": {1: Weights("h2", "ab", "1" * 8 + "2" * 8)}}, "weight that differs    version 1, b"),
        ({"weights": {}}, "0 weight versions compared"),
    ],
)
def test_the_first_difference_is_named(changed: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(SAME, replace(SAME, **changed)) == 1
    assert line in capsys.readouterr().out


def test_a_run_whose_old_log_probs_come_from_unrecorded_weights_is_refused() -> None:
    info = RunInfo("train_async.py", ["--keep-old-actor"], ".", 0.0, settings={"keep_old_actor": True})
    with pytest.raises(DataError, match="--keep-old-actor"):
        replay_argv(info)


@pytest.mark.parametrize("load", ["checkpoints/", "./checkpoints", "../run/checkpoints", "{cwd}/checkpoints"])
def test_the_checkpoints_of_the_run_are_not_the_start_of_its_replay_however_they_are_named(
    tmp_path: Path, load: str
) -> None:
    cwd = tmp_path / "run"
    (cwd / "checkpoints").mkdir(parents=True)
    load = load.format(cwd=cwd)
    argv = ["--strict-args", "--load", load, "--save", "checkpoints", "--lr", "1"]
    info = RunInfo("train.py", argv, str(cwd), 0.0, settings={"load": load, "save": "checkpoints"})
    assert list(replay_argv(info)) == ["--lr", "1"]
    other = replace(info, settings={"load": "elsewhere", "save": "checkpoints"})
    assert list(replay_argv(other)) == ["--load", load, "--lr", "1"]


def test_a_run_that_was_killed_while_it_wrote_is_executed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / FILE).write_text(json.dumps(asdict(RunInfo("train_async.py", ["--lr", "1"], str(run), 0.0))))
    (run / LEDGER).write_text("")
    Schedule(run / SCHEDULE).batch(0, [])
    weights = WeightHistory(run / WEIGHTS)
    weights.add(0, "aa", {"a": "0" * 32})
    with (run / SCHEDULE).open("a") as schedule:
        schedule.write('{"batch": 1, "sam')
    line = json.dumps({"train/step": 0, "train/loss": 0.5})
    (run / "metrics.jsonl").write_text(f'{{"train/st\n{line}\n')

    def execute(argv: Sequence[str], info: RunInfo, folder: Path) -> None:
        assert argv[:4] == ["--lr", "1", "--rollout-function-path", history._SCHEDULED]
        assert list(read_schedule(folder / BRANCH)) == [0]
        for name in (SCHEDULE, WEIGHTS, LEDGER, "metrics.jsonl"):
            shutil.copyfile(run / name, folder / name)

    monkeypatch.setattr(history, "_run", execute)
    assert replay_all(run, "again") == 0
    assert "1 rollouts, 1 weight versions compared" in capsys.readouterr().out
    with pytest.raises(DataError, match="exists: delete it, or name another folder"):
        replay_all(run, "again")
