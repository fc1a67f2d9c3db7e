"""Guarded child processes end with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime.utils.net import free_port, is_port_free
from slime.utils.process import GuardedProcess, has_ended, kill_group, log_tail
from tests.limits import unloaded_time

CHILD = (
    "import time, os, sys; from slime.utils.process import watch_owner; watch_owner(in_child={}); "
    "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
    "print('up', flush=True); time.sleep(100)"
)
OWNER = (
    "import sys, time; from pathlib import Path; from slime.utils.process import GuardedProcess; "
    "p = GuardedProcess([sys.executable, '-c', sys.argv[1]], log_path=Path(sys.argv[2])); "
    "print(p.pid, flush=True); time.sleep(100)"
)


def group_is_gone(leader: int, within_s: float = 5.0) -> bool:
    deadline = unloaded_time() + within_s
    while unloaded_time() < deadline:
        if not any(is_in_group(process.pid, leader) and not has_ended(process) for process in psutil.process_iter()):
            return True
        time.sleep(0.02)
    return False


def is_in_group(pid: int, leader: int) -> bool:
    try:
        return os.getpgid(pid) == leader
    except ProcessLookupError:
        return False


def wait_for_text(path: Path, text: str) -> None:
    deadline = unloaded_time() + 20
    while not path.exists() or text not in path.read_text():
        assert unloaded_time() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("in_child", [False, True])
def test_a_killed_owner_takes_the_child_and_its_children_along(in_child: bool, tmp_path: Path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", OWNER, CHILD.format(in_child), str(log)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    leader = int(owner.stdout.readline())
    wait_for_text(log, "up")
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert group_is_gone(leader)


def test_stop_ends_the_whole_group(tmp_path: Path):
    process = GuardedProcess([sys.executable, "-c", CHILD.format(False)], log_path=tmp_path / "log")
    wait_for_text(tmp_path / "log", "up")
    process.stop()
    assert process.exit_code() == -signal.SIGKILL
    assert group_is_gone(process.pid, within_s=1.0)


KEEPER = (
    "import os, tempfile, time; from slime.utils.process import watch_owner; watch_owner(); "
    "print('up', tempfile.mkstemp()[1], os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True); time.sleep(100)"
)


@pytest.mark.parametrize("is_owner_killed", [True, False])
def test_temporary_files_of_a_child_end_with_it_and_compiled_kernels_stay(is_owner_killed: bool, tmp_path: Path):
    log = tmp_path / "log"
    if is_owner_killed:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, KEEPER, str(log)], stdout=subprocess.PIPE, text=True)
        wait_for_text(log, "\n")
        end = owner.kill
    else:
        process = GuardedProcess([sys.executable, "-c", KEEPER], log_path=log)
        wait_for_text(log, "\n")
        end = process.stop
    _, file, kernels = log.read_text().split()
    folder = Path(file).parent
    assert folder.name.startswith("slime-process-")
    assert folder not in Path(kernels).parents
    assert Path(file).exists()
    end()
    deadline = unloaded_time() + 5
    while folder.exists():
        assert unloaded_time() < deadline
        time.sleep(0.02)


STOPPER = (
    "import os, psutil, signal, sys; from pathlib import Path; from slime.utils.process import GuardedProcess\n"
    "p = GuardedProcess([sys.executable, '-c', sys.argv[1]], log_path=Path(sys.argv[2]))\n"
    "print(p.pid, flush=True); sys.stdin.readline()\n"
    "psutil.pids = lambda: os.kill(os.getpid(), signal.SIGKILL); p.stop()"
)


def test_an_owner_that_is_killed_while_it_stops_its_child_takes_the_child_along(tmp_path: Path):
    command = [sys.executable, "-c", STOPPER, CHILD.format(False), str(tmp_path / "log")]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    leader = int(owner.stdout.readline())
    wait_for_text(tmp_path / "log", "up")
    owner.communicate("stop\n")
    assert owner.returncode == -signal.SIGKILL
    assert group_is_gone(leader)


PARENT_THAT_DOES_NOT_LOOK = (
    "import subprocess, sys, time; "
    "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True).pid, "
    "flush=True); time.sleep(100)"
)


HOLDER = (
    "import mmap, multiprocessing, os, sys, time; from slime.utils.process import watch_owner; watch_owner(); "
    "lock = multiprocessing.get_context('spawn').Lock(); "
    "fd = os.open({!r}, os.O_CREAT | os.O_RDWR); os.ftruncate(fd, 4096); held = mmap.mmap(fd, 4096); "
    "print('up', lock._semlock.name, flush=True); time.sleep(100)"
)


@pytest.mark.parametrize("is_owner_killed", [True, False])
def test_a_killed_server_leaves_no_shared_memory_and_that_of_others_stays(is_owner_killed: bool, tmp_path: Path):
    ours, theirs = (Path(f"/dev/shm/sglang_loads_{name}_{os.getpid()}.shm") for name in ("ours", "theirs"))
    log = tmp_path / "log"
    theirs.write_bytes(b"x")
    try:
        if is_owner_killed:
            command = [sys.executable, "-c", OWNER, HOLDER.format(str(ours)), str(log)]
            owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert owner.stdout is not None
            leader = int(owner.stdout.readline())
            wait_for_text(log, "up")
            owner.kill()
            owner.wait()
            assert group_is_gone(leader)
        else:
            process = GuardedProcess([sys.executable, "-c", HOLDER.format(str(ours))], log_path=log)
            wait_for_text(log, "up")
            assert ours.exists()
            process.stop()
        semaphore = Path("/dev/shm") / f"sem.{log.read_text().split()[1].lstrip('/')}"
        assert not ours.exists()
        assert not semaphore.exists()
        assert theirs.exists()
    finally:
        for path in (ours, theirs):
            path.unlink(missing_ok=True)


def test_shared_memory_that_another_process_has_mapped_outlives_a_killed_server(tmp_path: Path):
    shared = Path(f"/dev/shm/sglang_loads_shared_{os.getpid()}.shm")
    holders = []
    try:
        for number in range(2):
            log = tmp_path / f"log{number}"
            holders.append(GuardedProcess([sys.executable, "-c", HOLDER.format(str(shared))], log_path=log))
            wait_for_text(log, "up")
        holders[0].stop()
        assert shared.exists()
        holders[1].stop()
        assert not shared.exists()
    finally:
        for holder in holders:
            holder.stop()
        shared.unlink(missing_ok=True)


def test_the_end_of_a_process_is_enough_when_its_parent_does_not_notice_it():
    parent = subprocess.Popen([sys.executable, "-c", PARENT_THAT_DOES_NOT_LOOK], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        leader = int(parent.stdout.readline())
        started = unloaded_time()
        kill_group(leader)
        assert unloaded_time() < started + 2.5, "half of what it waits for one that does not end"
        assert psutil.Process(leader).status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()


def test_stopping_again_leaves_alone_what_has_its_descriptor_now(tmp_path: Path):
    process = GuardedProcess([sys.executable, "-c", "pass"], log_path=tmp_path / "log")
    descriptor = process._guard
    process.stop()
    other = os.open(os.devnull, os.O_RDONLY)
    if other != descriptor:
        os.dup2(other, descriptor)
        os.close(other)
    process.stop()
    os.fstat(descriptor)
    os.close(descriptor)


def test_the_log_tail_shows_the_last_lines(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("\n".join(map(str, range(100))))
    assert log_tail(log, 2) == "    98\n    99"
    assert "no log" in log_tail(tmp_path / "missing")


def test_the_log_tail_shows_the_error_and_not_the_leaks_that_nanobind_reports_after_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    noise = ["nanobind: leaked 64 types!", *[' - leaked type "triton._C.libtriton.ir.location"'] * 40]
    end = [" - ... skipped remainder", "nanobind: this is likely", "See https://nanobind.readthedocs.io/"]
    log.write_text("\n".join(["Traceback:", "ValueError: the cause", *noise, *end]))
    assert log_tail(log) == "    Traceback:\n    ValueError: the cause"


def test_a_port_in_use_is_not_free():
    import socket

    port = free_port()
    assert is_port_free("127.0.0.1", port)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_port_free("127.0.0.1", port)
