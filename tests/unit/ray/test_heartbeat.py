"""The verdict on a process that gives no sign of life, with the kernel's answers given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import RpcError

from slime.ray.watch import heartbeat
from slime.ray.watch.heartbeat import HeartbeatWatch, ProcessInfo, Usage, WorkReport, _kill, _nameless_file, _usage
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.process import work_of


def test_a_report_of_work_adds_up_what_was_done_since_the_last_one_and_names_idle_processes(monkeypatch):
    processes = [ProcessInfo(f"trainer rank {n}", n, "here", 1.0, "", "", f"a{n}", "node", 10.0) for n in range(10)]
    beats: dict[str, bytes | None] = {f"a{n}": b"1 30.00 2000000000" for n in range(10)}
    monkeypatch.setattr(heartbeat, "last_heartbeat", lambda process: beats[process.actor_id])
    report = WorkReport()
    assert report.text(processes) == "10 processes used 300.0 s of processor time and read 20.000 GB"
    beats |= {"a0": b"9 90.50 2000000000", "a1": b"9 30.10 3500000000"}
    text = report.text(processes[:3])
    assert text.startswith(
        "3 processes used 60.6 s of processor time and read 1.500 GB, idle: trainer rank 2 (pid 2 on"
    )
    assert report.text(processes).endswith("trainer rank 7 (pid 7 on here) and 2 more")
    beats["a0"] = None  # no heartbeat yet, as before the first one
    WorkReport().text(processes)


def test_a_heartbeat_holds_the_work_of_its_process(tmp_path, monkeypatch):
    sent: list[str] = []

    def put(key: str, value: str, namespace: str) -> None:
        sent.append(value)

    def rest(seconds: float) -> None:
        if len(sent) == 2:
            raise StopIteration
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        (tmp_path / "weights").write_bytes(bytes(3 << 20))
        (tmp_path / "weights").read_bytes()

    monkeypatch.setattr(heartbeat, "_internal_kv_put", put)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(sleep=rest))  # other threads of this process sleep too
    with pytest.raises(StopIteration):
        heartbeat._send_heartbeats("a", 2.0)
    (number, cpu_s, num_bytes), (second, later_s, later_bytes) = (map(float, text.split()) for text in sent)
    assert (number, second) == (0, 1)
    assert later_s - cpu_s > 0.05
    assert later_bytes - num_bytes >= 3 << 20


@pytest.mark.parametrize("error", [AttributeError("io_counters"), psutil.AccessDenied(), PermissionError()])
def test_a_kernel_that_does_not_count_bytes_does_not_end_the_heartbeats(monkeypatch, error):
    def refuse(process: psutil.Process) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "io_counters", refuse)
    cpu_s, num_bytes = work_of(psutil.Process())
    assert cpu_s > 0
    assert num_bytes == 0


class World:
    """A process that a caller waits for: its heartbeats, the kernel's report, and whether it was killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silence_s: float = 10.0) -> None:
        self.now, self.beat, self.usage, self.is_killed = 100.0, b"0", Usage("sleeping", 5.0), False
        process = ProcessInfo("trainer rank 1", 7, "here", 1.0, "", "", "actor", "node", silence_s)
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(heartbeat, "processes_of", lambda refs: [process])
        monkeypatch.setattr(heartbeat, "last_heartbeat", lambda process: self.read())
        monkeypatch.setattr(heartbeat, "_on_node_of", self.ask)
        self.watch = HeartbeatWatch()

    def read(self) -> bytes:
        return self.beat

    def ask(self, process: ProcessInfo, function: Any) -> Usage | None:
        if function is _kill:
            self.is_killed = True
            return None
        return self.usage

    def reason_after(self, seconds: float, *, cpu: float = 0.0, beats: bool = False) -> tuple[float, str] | None:
        """(seconds, reason) of the verdict, looking once a second while the process uses ``cpu`` of a processor."""
        start = self.now
        while self.now < start + seconds:
            self.now += 1.0
            if beats:
                self.beat = str(self.now).encode()
            self.usage = Usage(self.usage.state, self.usage.cpu_s + cpu)
            if gone := self.watch.look(["ref"]):
                return self.now - start, gone[1]
        return None


def test_a_stopped_process_is_killed_once_it_has_been_silent_for_long_enough(monkeypatch):
    world = World(monkeypatch)
    world.usage = Usage(psutil.STATUS_STOPPED, 5.0)
    found = world.reason_after(60)
    assert found is not None
    assert 10 <= found[0] <= 14
    assert "it was stopped, as by SIGSTOP: no sign of life for 10 s" in found[1]
    assert world.is_killed


def test_a_process_that_beats_is_left_alone_whatever_the_kernel_says(monkeypatch):
    world = World(monkeypatch)
    world.usage = Usage(psutil.STATUS_STOPPED, 5.0)
    assert world.reason_after(300, beats=True) is None


def test_native_code_that_works_is_left_alone_and_one_that_hangs_is_not(monkeypatch):
    world = World(monkeypatch)
    assert world.reason_after(300, cpu=0.9) is None
    assert not world.is_killed
    world = World(monkeypatch)
    found = world.reason_after(300, cpu=0.01)  # Ray's own threads
    assert found is not None
    assert 60 <= found[0] <= 66
    assert "hangs in native code" in found[1]


@pytest.mark.parametrize("state", [psutil.STATUS_TRACING_STOP, psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP])
def test_a_process_that_is_debugged_or_gets_no_processor_or_disk_is_left_alone(state, monkeypatch):
    world = World(monkeypatch)
    world.usage = Usage(state, 5.0)
    assert world.reason_after(300) is None


def test_time_in_which_nobody_looked_is_no_silence(monkeypatch):
    world = World(monkeypatch)
    world.usage = Usage(psutil.STATUS_STOPPED, 5.0)
    assert world.reason_after(4) is None
    world.now += 3600  # the driver was stopped itself, or the machine slept
    assert world.reason_after(2) is None
    assert world.reason_after(60, beats=True) is None


def test_heartbeats_that_cannot_be_read_say_nothing(monkeypatch):
    world = World(monkeypatch)
    world.usage = Usage(psutil.STATUS_STOPPED, 5.0)

    def fail() -> bytes:
        raise RpcError("the store is away")

    monkeypatch.setattr(world, "read", fail)
    assert world.reason_after(300) is None


def test_the_kernel_is_asked_about_this_very_process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        created = psutil.Process(process.pid).create_time()
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: _usage(process.pid, created).state == psutil.STATUS_STOPPED, Deadline(600, "the stop"))
        assert _usage(process.pid, created - 1.0) is None
        _kill(process.pid, created - 1.0)
        assert process.poll() is None, "another process with its number"
        _kill(process.pid, created)
        assert process.wait() == -signal.SIGKILL
    assert _usage(process.pid, created) is None


def test_the_file_for_stacks_has_no_name_and_may_be_emptied_by_its_reader(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with _nameless_file() as file:
        assert list(tmp_path.iterdir()) == []
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        for text in ("first stacks", "second"):
            os.truncate(path, 0)
            file.write(text)
            file.flush()
            with open(path) as opened:
                assert opened.read() == text
