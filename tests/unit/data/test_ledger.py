"""The ledger's report of prompts that are lost, trained twice, or replayed. A torn line is skipped."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from slime.cli import main
from slime.data.ledger import (
    LEDGER,
    Audit,
    Ledger,
    audit,
    examine_ledger,
    find_ledger,
    format_numbers,
    parse_numbers,
    read_ledger,
)
from slime.utils.errors import DataError


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / LEDGER)


def result(tmp_path: Path) -> Audit:
    entries, unreadable = read_ledger(tmp_path / LEDGER)
    assert unreadable == 0
    return audit(entries)


def rollout(ledger: Ledger, number: int, *, trains: bool = True, saves: bool = False) -> None:
    """A rollout of two groups as a run makes it."""
    groups = [2 * number, 2 * number + 1]
    ledger.write("drawn", groups=groups)
    ledger.write("used", rollout=number, groups=groups)
    if saves:
        ledger.write("saved", rollout=number, groups=[])
    if trains:
        ledger.write("trained", rollout=number)


@pytest.mark.parametrize("numbers", [[], [5], [0, 1, 2], [9, 3, 4, 7], [0, 2, 4, 5]])
def test_numbers_survive_writing_and_reading(numbers):
    assert parse_numbers(format_numbers(numbers)) == sorted(numbers)


def test_what_is_no_number_is_left_out():
    assert format_numbers([None, "x", 3, 4]) == "3-4"


def test_a_plain_run_is_clean(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    for number in range(4):
        rollout(ledger, number)
    found = result(tmp_path)
    assert found.is_clean
    assert found.counts == {"trained": 8}
    assert (found.num_rollouts, found.num_starts, found.num_replayed) == (4, 1, 0)


def test_a_run_that_goes_back_to_its_checkpoint_replays_what_came_after(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    rollout(ledger, 0)
    rollout(ledger, 1, saves=True)
    rollout(ledger, 2)
    rollout(ledger, 3, trains=False)  # killed here
    ledger.write("begin", rollout=2, groups=[])
    rollout(ledger, 2)
    rollout(ledger, 3)
    found = result(tmp_path)
    assert found.is_clean
    assert found.counts == {"trained": 8}
    assert found.num_replayed == 5


def test_a_run_that_trains_on_kept_batches_again_replays_the_training_but_not_the_batches(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    for number in range(3):
        rollout(ledger, number, saves=True)  # the checkpoint is that of rollout 0
    ledger.write("drawn", groups=[6])  # killed here
    ledger.write("begin", rollout=3, groups=[], trains=1)
    assert not result(tmp_path).lost
    ledger.write("trained", rollout=1)
    ledger.write("trained", rollout=2)
    rollout(ledger, 3)
    found = result(tmp_path)
    assert found.is_clean
    assert found.counts == {"trained": 8}
    assert (found.num_rollouts, found.num_replayed) == (4, 3)


def test_a_rollout_made_ahead_does_not_undo_the_training_of_the_one_before(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    rollout(ledger, 0, saves=True, trains=False)
    rollout(ledger, 1, trains=False)
    ledger.write("trained", rollout=0)  # after rollout 1 was made: train_async.py
    ledger.write("begin", rollout=1, groups=[])
    rollout(ledger, 1)
    found = result(tmp_path)
    assert found.is_clean
    assert found.counts == {"trained": 4}


def test_a_run_without_a_checkpoint_begins_from_nothing(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    rollout(ledger, 0)
    ledger.write("begin", rollout=0)
    rollout(ledger, 0)
    found = result(tmp_path)
    assert found.is_clean
    assert found.counts == {"trained": 2}


def test_a_group_in_two_batches_was_trained_on_twice(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    rollout(ledger, 0)
    ledger.write("used", rollout=1, groups=[1])
    ledger.write("trained", rollout=1)
    assert result(tmp_path).twice == {1: [0, 1]}


def test_weights_that_went_back_without_the_prompts_show_as_lost_ones(ledger, tmp_path):
    """The Data Buffer continues, but the weights start again at rollout 1: its prompts were not trained on."""
    ledger.write("begin", rollout=0)
    rollout(ledger, 0, saves=True)
    rollout(ledger, 1)
    ledger.write("begin", rollout=1, groups=[])
    rollout(ledger, 2)
    assert sorted(result(tmp_path).lost) == [2, 3]


def test_a_rollout_that_was_skipped_by_the_trainer_is_lost(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    rollout(ledger, 0)
    rollout(ledger, 1, trains=False)
    rollout(ledger, 2)
    assert sorted(result(tmp_path).lost) == [2, 3]
    assert "rollout 1" in result(tmp_path).lost[2]


def test_groups_under_way_at_a_checkpoint_must_be_given_back(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    ledger.write("drawn", groups=range(5))
    ledger.write("used", rollout=0, groups=[0, 1])
    ledger.write("saved", rollout=0, groups=[2, 3, 4])
    ledger.write("begin", rollout=1, groups=[2, 3])
    found = result(tmp_path)
    assert list(found.lost) == [4]
    assert found.counts["waiting"] == 2


def test_returned_dropped_and_unused_groups_are_not_lost(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    ledger.write("drawn", groups=range(5))
    ledger.write("returned", groups=[4])
    ledger.write("used", rollout=0, groups=[0, 1])
    ledger.write("dropped", rollout=0, groups=[2, 3])
    ledger.write("trained", rollout=0)
    found = result(tmp_path)
    assert found.is_clean
    assert found.counts == {"trained": 2, "dropped": 2, "waiting": 1}


def test_a_torn_last_line_is_cut_off_by_the_next_start(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    path = tmp_path / LEDGER
    with path.open("a") as file:
        file.write('{"event": "dra')
    assert read_ledger(path) == ([json.loads(path.read_text().splitlines()[0])], 1)
    Ledger(path).write("begin", rollout=0)
    assert [entry["event"] for entry in read_ledger(path)[0]] == ["begin", "begin"]


def test_a_torn_line_that_is_longer_than_a_block_is_cut_off(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr("slime.data.ledger._BLOCK", 7)
    path = tmp_path / LEDGER
    ledger.write("begin", rollout=0)
    whole = path.read_bytes()
    for torn in (b"", b"x", b"x" * 7, b"x" * 50):
        path.write_bytes(whole + torn)
        Ledger(path).close()
        assert path.read_bytes() == whole
    path.write_bytes(b"x" * 50)
    Ledger(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["[]", "{}", '{"event": "eaten"}', '{"event": "drawn", "groups": "a-b"}', "3"])
def test_lines_that_are_no_entries_are_counted(line, tmp_path):
    (tmp_path / LEDGER).write_text(line + "\n")
    assert read_ledger(tmp_path / LEDGER) == ([], 1)


def test_the_doctor_says_what_happened_and_fails(ledger, tmp_path):
    ledger.write("begin", rollout=0)
    rollout(ledger, 0)
    out = io.StringIO()
    assert examine_ledger(tmp_path, out) == 0
    assert "ok: no prompt was lost" in out.getvalue()
    ledger.write("used", rollout=1, groups=[0, 1])
    ledger.write("trained", rollout=1)
    out = io.StringIO()
    assert examine_ledger(tmp_path / LEDGER, out) == 1
    assert "TRAINED TWICE: 2 groups: 0-1" in out.getvalue()
    assert "group 0: trained on in rollouts [0, 1]" in out.getvalue()


def test_the_command_finds_the_ledger_through_the_folder_of_a_run(ledger, tmp_path, capsys):
    ledger.write("begin", rollout=0)
    run = tmp_path / "run"
    run.mkdir()
    (run / "progress.json").write_text(json.dumps({"ledger": str(tmp_path / LEDGER)}))
    assert find_ledger(run) == tmp_path / LEDGER
    assert main(["doctor", "ledger", str(run)]) == 0
    assert main(["doctor", "ledger", str(tmp_path / "nowhere")]) == 2
    assert "holds no ledger.jsonl" in capsys.readouterr().err
    with pytest.raises(DataError):
        find_ledger(tmp_path / "nowhere")


def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_nothing_of_it(ledger, tmp_path, monkeypatch):
    rollout(ledger, 0)
    before = (tmp_path / LEDGER).read_bytes()
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:9]))
        with pytest.raises(OSError, match="No space left"):
            ledger.write("trained", rollout=1)
    assert (tmp_path / LEDGER).read_bytes() == before
    rollout(ledger, 1)
    assert result(tmp_path).is_clean


def test_the_ledger_does_not_claim_what_it_cannot_know_after_a_start_with_changed_data(tmp_path):
    ledger = Ledger(tmp_path / LEDGER)
    ledger.write("begin", rollout=0, groups=[])
    ledger.write("drawn", groups=[0, 1])
    ledger.write("used", rollout=0, groups=[0, 1])
    ledger.write("trained", rollout=0)
    ledger.write("saved", rollout=0, groups=[])
    ledger.write("begin", rollout=1, groups=[], changed="--accept-changed-data: the content changed")
    ledger.close()
    found = audit(read_ledger(tmp_path / LEDGER)[0])
    assert (found.lost, found.twice, found.is_clean) == ({}, {}, False)
    printed = io.StringIO()
    assert examine_ledger(tmp_path, printed) == 1
    assert "UNKNOWN" in printed.getvalue()
    assert "rollout 1: --accept-changed-data: the content changed" in printed.getvalue()
    assert "no prompt was lost" not in printed.getvalue()
