"""Two recorded histories are compared: the first token, loss and weight that differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime.data.schedule import Planned, Weights
from slime.observability.run_info import RunInfo
from slime.replay.history import History, compare, replay_argv
from slime.utils.errors import DataError

SAME = History(
    Path("run"),
    {0: [Planned(0, 0, 11, ((0, 8),)), Planned(0, 1, 12, ((0, 8),))], 1: [Planned(1, 2, 13, ((0, 3), (1, 8)))]},
    {0: Weights("h0", {"a": "0", "b": "0"}), 1: Weights("h1", {"a": "1", "b": "1"})},
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
        ({"weights": {1: Weights("h2", {"a": "1", "b": "2"})}}, "weight that differs    version 1, b"),
        ({"weights": {}}, "0 weight versions compared"),
    ],
)
def test_the_first_difference_is_named(changed: dict, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(SAME, replace(SAME, **changed)) == 1
    assert line in capsys.readouterr().out


def test_a_run_whose_old_log_probs_come_from_unrecorded_weights_is_refused() -> None:
    info = RunInfo("train_async.py", ["--keep-old-actor"], ".", 0.0, settings={"keep_old_actor": True})
    with pytest.raises(DataError, match="--keep-old-actor"):
        replay_argv(info)
