"""``run.log``: the lines of all processes, and which of them the terminal shows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slime.observability.logging_utils import RUN_LOG, LineFormatter, RunLog, driver_logs

INFO = "[2026-11-23 07:00:00 train-0] INFO actor.py:103 - trainer ready"
WARNING = "[2026-11-23 07:00:00 train-{rank}] WARNING step.py:5 - rank {rank} skipped a step"


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    made = RunLog()
    made.open(tmp_path / "run.log")
    return made


def text_of(log: RunLog) -> list[str]:
    assert log.path is not None
    return log.path.read_text().splitlines()


def test_warnings_of_actors_reach_the_terminal_and_everything_the_file(
    log: RunLog, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [INFO, WARNING.format(rank=0), "    more of it", INFO, "    more of no warning", "printed"]
    log.from_actor("TrainActor 7", lines)
    assert capfd.readouterr().err == "warning: train-0: rank 0 skipped a step\n    more of it\n"
    assert text_of(log) == [*lines[:5], "[TrainActor 7] printed"]


def test_the_same_warning_of_other_ranks_is_in_the_file_only(log: RunLog, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 2):
        log.from_actor(f"TrainActor {rank}", [WARNING.format(rank=rank), "    detail"])
    log.from_actor("TrainActor 0", [WARNING.format(rank=0)])
    assert capfd.readouterr().err.count("skipped a step") == 2
    assert len(text_of(log)) == 7


@pytest.mark.parametrize("is_shown", [False, True])
def test_printed_text_is_shown_if_the_run_says_so(
    log: RunLog, capfd: pytest.CaptureFixture[str], is_shown: bool
) -> None:
    log.shows_prints = is_shown
    log.from_actor("RolloutManager 7", ["my value is 3", ""], is_error=False)
    log.from_actor("RolloutManager 7", ["a library's complaint"], is_error=True)
    assert capfd.readouterr().err == ("printed: my value is 3\n" if is_shown else "")
    assert "[RolloutManager 7] my value is 3" in text_of(log)


def test_the_file_has_no_codes_of_a_terminal(log: RunLog) -> None:
    log.write(["\x1b[36mblue\x1b[0m", "10%\r50%\r100%", "ends\r"])
    assert text_of(log) == ["blue", "100%", "ends"]


def test_lines_before_the_folder_is_known_are_kept(tmp_path: Path) -> None:
    log = RunLog()
    log.write(["early"])
    log.open(tmp_path / "run.log")
    log.open(tmp_path / "run.log")
    log.write(["late"])
    assert text_of(log) == ["early", "late"]


def test_records_of_the_driver_go_to_the_file_and_warnings_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, root = logging.getLogger("slime.some.room"), logging.getLogger()
    before = root.handlers[:]
    with driver_logs():
        RUN_LOG.open(tmp_path / "run.log")
        logger.info("quiet")
        logger.warning("two\nlines")
    assert root.handlers == before
    assert capfd.readouterr().err == "warning: two\nlines\n"
    quiet, first, second = (tmp_path / "run.log").read_text().splitlines()
    assert quiet.endswith("- quiet")
    assert " driver] WARNING test_run_log.py:" in first
    assert second == "    lines"


def test_the_terminal_understands_the_lines_that_actors_log(log: RunLog, capfd: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("x", logging.ERROR, "/a/file.py", 3, "bad %s\nworse", ("luck",), None)
    log.from_actor("TrainActor 7", LineFormatter(" train-0").format(record).splitlines())
    assert capfd.readouterr().err == "error: train-0: bad luck\n    worse\n"
