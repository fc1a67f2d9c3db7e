"""The one wait on Ray: its checks between two looks for the answer. Ray's part is a fake."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from slime.ray import watch
from slime.ray.watch import get
from slime.utils.async_utils import Deadline, Interrupted, interruptible
from slime.utils.errors import DeadlineExceeded, ProcessDied
from tests.unit.utils.test_interrupt import lose_an_interruption, lost


class HeartbeatWatch:
    gone: Any = None

    def look(self, pending: list[Any]) -> Any:
        return self.gone


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the seconds of each wait on Ray, which never has an answer."""
    asked: list[float] = []

    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        asked.append(timeout)
        threading.Event().wait(min(timeout, 0.01))
        return [], refs

    def late(pending: list[Any], count: int, deadline: Deadline) -> DeadlineExceeded:
        return deadline.error(f"{len(pending)} of {count}")

    monkeypatch.setattr(watch.ray, "wait", wait)
    monkeypatch.setattr(watch, "timeout_report", late)
    monkeypatch.setattr(watch, "HeartbeatWatch", HeartbeatWatch)
    return asked


@lost
def test_a_wait_looks_up_every_second_at_least_and_ends_with_the_report(slices):
    with pytest.raises(DeadlineExceeded, match=r"rollout 3. 1 of 1. --rollout-timeout"):
        get(["ref"], 0.2, "rollout 3", "--rollout-timeout")
    assert len(slices) > 1
    with pytest.raises(Interrupted), interruptible():
        get(["ref"], 3600.0, "rollout 3", meanwhile=lose_an_interruption)
    assert max(slices) <= 1.0


def test_a_wait_for_a_start_reports_the_work_of_its_processes_every_minute(slices, monkeypatch, caplog):
    monkeypatch.setattr(watch, "_WORK_EVERY_S", 0.05)
    monkeypatch.setattr(watch, "processes_of", lambda refs: refs)
    monkeypatch.setattr(watch.WorkReport, "text", lambda self, processes: f"{len(processes)} work")

    def stop_after_a_report() -> None:
        if "s for the trainer to start: 2 work" in caplog.text or len(slices) > 20_000:
            raise StopIteration

    with pytest.raises(StopIteration):
        get(["a", "b"], 600.0, "the trainer to start", meanwhile=stop_after_a_report, reports_work=True)
    assert "2 work" in caplog.text
    caplog.clear()
    with pytest.raises(DeadlineExceeded):
        get(["a", "b"], 0.2, "the trainer to start")
    assert caplog.text == ""


class OverInAMoment(Deadline):
    """Its time is over between a look at what remains and the next line."""

    looks = 0

    @property
    def remaining(self) -> float:
        self.looks += 1
        return 1e-6 if self.looks <= 2 else super().remaining


def test_a_deadline_that_passes_between_two_lines_ends_with_the_report_as_well(monkeypatch):
    monkeypatch.setattr(watch, "Deadline", OverInAMoment)
    with pytest.raises(DeadlineExceeded, match=r"rollout 3. 1 of 1"):
        get(["ref"], 0.0, "rollout 3")


def test_what_is_done_meanwhile_may_end_the_wait(slices):
    def fail() -> None:
        raise ProcessDied("engine 0 died")

    with pytest.raises(ProcessDied, match="engine 0"):
        get(["ref"], 3600.0, "rollout 3", meanwhile=fail, slice_s=0.5)
    assert slices == [0.5]


def test_whoever_does_not_live_any_more_ends_the_wait(monkeypatch):
    monkeypatch.setattr(HeartbeatWatch, "gone", ("rank 1", "it was stopped"))
    monkeypatch.setattr(watch, "silence_report", lambda process, reason, *_: ProcessDied(f"{process}: {reason}"))
    with pytest.raises(ProcessDied, match="rank 1: it was stopped"):
        get(["a", "b"], 3600.0, "both to train")


def test_a_long_wait_tells_each_time_it_has_doubled_where_the_others_are(monkeypatch, caplog):
    monkeypatch.setattr(watch, "_REPORT_AFTER_S", 0.05)
    monkeypatch.setattr(watch, "processes_of", lambda refs: refs)
    monkeypatch.setattr(watch, "stacks_of", lambda processes: [f"  {process} is at:" for process in processes])
    with caplog.at_level(logging.WARNING), pytest.raises(DeadlineExceeded):
        get(["rank 0"], 0.5, "the trainer")
    told = [record.getMessage() for record in caplog.records]
    assert 2 <= len(told) <= 4
    assert told[0] == "has waited 0 s for the trainer\n  rank 0 is at:"
