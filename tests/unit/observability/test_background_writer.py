"""Files that are written while the process goes on: nothing is lost, and nothing is waited for without end."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from slime.data.sample import Sample
from slime.observability.sample_record import BackgroundWriter, read_rows, record_file, record_rollout

ROOT = Path(__file__).resolve().parents[3]


def test_jobs_are_done_in_order_and_flush_waits_for_all_of_them() -> None:
    writer, done = BackgroundWriter(), list[int]()
    for number in range(30):  # more than there is room for
        writer.submit(partial(done.append, number))
    assert writer.flush(30)
    assert done == list(range(30))


def test_a_writer_without_jobs_is_flushed_at_once() -> None:
    assert BackgroundWriter().flush(0)


def test_a_job_that_raises_is_shown_and_the_next_one_is_done(caplog: pytest.LogCaptureFixture) -> None:
    writer, done = BackgroundWriter(), list[int]()
    writer.submit(lambda: done.append(1 // 0))
    writer.submit(lambda: done.append(1))
    assert writer.flush(30)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text


def test_a_disk_that_hangs_costs_a_deadline_and_a_record_but_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, goes_on = BackgroundWriter(room=1), threading.Event()
    is_busy = threading.Event()
    writer.submit(lambda: (is_busy.set(), goes_on.wait(60)))
    assert is_busy.wait(120)
    writer.submit(lambda: None)  # the one that may wait
    with pytest.raises(TimeoutError, match="1 files have waited for the disk"):
        writer.submit(lambda: None, timeout_s=0.01)
    assert not writer.flush(0.01)
    monkeypatch.setattr(BackgroundWriter.submit, "__defaults__", (0.01,))
    with caplog.at_level(logging.WARNING):
        record_rollout(tmp_path, [Sample()], rollout_id=0, limit=1, reward_key=None, writer=writer)
    assert "the run goes on without it" in caplog.text
    goes_on.set()
    assert writer.flush(30)


def test_a_record_holds_the_samples_as_they_were_when_it_was_asked_for(tmp_path: Path) -> None:
    writer, goes_on = BackgroundWriter(), threading.Event()
    writer.submit(lambda: goes_on.wait(60))
    sample = Sample(index=0, tokens=[1, 2], response_length=1, loss_mask=[1], reward=1.0, metadata={"turns": 1})
    record_rollout(tmp_path, [sample], rollout_id=0, limit=1, reward_key=None, writer=writer)
    sample.loss_mask[0] = 0  # type: ignore[index]
    sample.metadata["turns"] = 2
    sample.reward = 0.0
    goes_on.set()
    assert writer.flush(30)
    (row,) = read_rows(record_file(tmp_path, "rollout", 0))
    assert (row["loss_mask"], row["reward"], row["trained_tokens"]) == ([1], 1.0, 1)
    assert '"turns": 1' in row["rest"]


SLOW = """
import signal, sys, threading
from pathlib import Path
from slime.observability.sample_record import BackgroundWriter

signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # as a worker of Ray does
writer, is_late = BackgroundWriter(), threading.Event()
writer.submit(lambda: is_late.wait(0.3))
writer.submit(lambda: Path(sys.argv[1]).write_text("whole"))
print("ready", flush=True)
if sys.argv[2] == "raise":
    raise RuntimeError("a step failed")
if sys.argv[2] == "wait":
    threading.Event().wait(60)
"""


@pytest.mark.parametrize(("end", "code"), [("leave", 0), ("raise", 1), ("wait", 3)])
def test_a_process_that_ends_has_written_its_files(tmp_path: Path, end: str, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(tmp_path / "file"), end],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if end == "wait":
        process.send_signal(signal.SIGTERM)
    assert process.wait() == code
    assert (tmp_path / "file").read_text() == "whole"
