"""How long a start may take: real processes that print, compute, read, or do nothing, on a clock of the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.backends.sglang_utils import server_process
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.server_process import STALL_TIMEOUT_S, Activity, NodeServer, StartProgress, activity_of
from slime.ray.arguments import parse_only
from slime.utils.errors import EngineError
from slime.utils.net import claim_ports
from slime.utils.process import GuardedProcess, has_ended

# Works when the test says so, and acknowledges it.
WORKER = """
import os, subprocess, sys, time
def print_line(): print("loading", file=sys.stderr, flush=True)
def compute():
    end = time.process_time() + 1.0
    while time.process_time() < end: pass
def read(): open(__file__ + ".weights", "rb").read()
def compute_in_child(): subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.0: pass"])
def nothing(): pass
for line in sys.stdin:
    globals()[line.strip()]()
    print("done", flush=True)
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Callable[[str], Activity]]:
    """``work(kind)`` lets the process work once. Returns its activity so far."""
    script, log = tmp_path / "worker.py", tmp_path / "log"
    script.write_text(WORKER)
    Path(f"{script}.weights").write_bytes(bytes(4 << 20))
    with log.open("wb") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen([sys.executable, str(script)], text=True, **pipes)

    def once(kind: str) -> Activity:
        process.stdin.write(f"{kind}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        return activity_of(process.pid, log)

    once("nothing")  # the interpreter has started
    yield once
    process.stdin.close()
    process.wait()
    process.stdout.close()


@pytest.fixture
def progress(work, clock) -> StartProgress:
    """Of a server whose interpreter has started."""
    made = StartProgress("engine 3 (http://node-7:15000)", 3600.0, clock)
    clock.now += 5.0
    assert made.failure(lambda: [work("print_line")]) is None
    return made


@pytest.mark.parametrize("kind", ["print_line", "compute", "read", "compute_in_child", "nothing"])
def test_any_kind_of_work_prolongs_a_start_by_ten_minutes(work, clock, progress, kind):
    clock.now += 10.0
    assert progress.failure(lambda: [work(kind)]) is None
    clock.now += STALL_TIMEOUT_S - 5.0
    failure = progress.failure(lambda: [work("nothing")])
    assert (failure is not None) == (kind == "nothing")
    clock.now += 10.0
    assert progress.failure(lambda: [work("nothing")]) is not None


def test_a_server_that_does_nothing_fails_with_its_name_what_was_seen_and_the_flag(work, clock, progress):
    clock.now += STALL_TIMEOUT_S
    failure = progress.failure(lambda: [work("nothing")])
    assert failure.startswith("engine 3 (http://node-7:15000) stopped working: for 600 s its log grew by 0.0 kB, and ")
    assert "its processes used 0.0 s of processor time and read 0.000 GB" in failure
    assert "605 s after its start" in failure
    assert "--engine-start-timeout" in failure


def test_a_server_that_works_for_ever_fails_at_the_limit(work, clock, progress):
    clock.now += 3590.0
    assert progress.failure(lambda: [work("print_line")]) is None
    clock.now += 10.0
    failure = progress.failure(lambda: [work("print_line")])
    assert failure == "engine 3 (http://node-7:15000) is not healthy after 3600 s (--engine-start-timeout)"


def test_a_node_that_has_not_started_yet_is_waited_for_and_its_work_counts_for_the_whole_engine(work, clock, progress):
    parts = [work("nothing"), None]
    clock.now += STALL_TIMEOUT_S + 1.0
    assert progress.failure(lambda: parts) is None
    for log_bytes in (10, 20):
        clock.now += STALL_TIMEOUT_S - 1.0
        assert progress.failure(lambda: [parts[0], Activity(log_bytes=log_bytes)]) is None  # noqa: B023
    clock.now += STALL_TIMEOUT_S
    assert progress.failure(lambda: [parts[0], Activity(log_bytes=20)]) is not None


def test_a_long_start_warns_every_minute_with_what_was_seen(clock, caplog):
    progress = StartProgress("engine 0", 3600.0, clock)
    for second in range(0, 125, 5):
        clock.now = 1000.0 + second
        seen = Activity(second * 1000, second / 2, second * 10**9)
        assert progress.failure(lambda: [seen, None if second < 100 else Activity()]) is None  # noqa: B023
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "engine 0 has been starting for 60 s: in the last 60 s its log grew by 60.0 kB, and its processes used 30.0 s "
        "of processor time and read 60.000 GB. 1 of its 2 nodes have not started. It has until 3600 s "
        "(--engine-start-timeout)."
    )
    assert "read 60.000 GB. It has until" in second


def test_an_engine_that_does_nothing_is_killed_and_its_error_shows_its_log(tmp_path, monkeypatch):
    """A real process through the whole start, with a limit of a second."""
    monkeypatch.setattr(server_process, "STALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(server_process, "_LOOK_EVERY_S", 0.0)
    log, command = tmp_path / "engine.log", "echo waits for a lock; exec sleep 600"
    started: list[psutil.Process] = []

    def launch(server: NodeServer, deadline: Any) -> None:
        server.process = GuardedProcess(["sh", "-c", command], log_path=log)
        started.append(psutil.Process(server.process.pid))

    monkeypatch.setattr(NodeServer, "start", launch)
    engine = SGLangEngine(EngineSpec(7, "127.0.0.1", claim_ports("127.0.0.1").first, [], {}, log))
    with pytest.raises(
        EngineError, match=r"(?s)engine 7 \(http://127.* stopped working.*engine.log:\n    waits for a "
    ):
        engine.start()
    assert has_ended(started[0])


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 3600.0), (10**9, 3600.0), (2 * 10**12, 10600.0)])
def test_the_limit_of_a_start_grows_with_the_checkpoint(tmp_path, num_bytes, seconds):
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(num_bytes)  # a sparse file
    args, problems = parse_only(["--hf-checkpoint", str(tmp_path), "--debug-rollout-only"], loads_hooks=False)
    assert args is not None, problems
    assert args.engine_start_timeout == seconds
    notes = [str(note) for note in args.notices if note.flag == "--engine-start-timeout"]
    assert notes == (["--engine-start-timeout: 10600 s, to read 2.0 TB"] if num_bytes > 10**12 else [])
    words = ["--hf-checkpoint", str(tmp_path), "--debug-rollout-only", "--engine-start-timeout", "50"]
    args, _ = parse_only(words, loads_hooks=False)
    assert args is not None
    assert args.engine_start_timeout == 50
