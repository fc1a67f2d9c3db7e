"""Child processes that end with this process, and the last lines of their logs.

A guarded child holds the read end of a pipe. Only this process has the write end. When this process ends, the kernel
closes the pipe, and the child kills its whole process group. This also works after SIGKILL. In contrast to
``PR_SET_PDEATHSIG``, it does not depend on the thread that started the child.

A killed process cannot delete its files. :func:`kill_group` deletes the private files of SGLang and multiprocessing in
/dev/shm that only the group has mapped. Temporary files of a guarded child are in a folder that is deleted with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

GUARD_FD_VARIABLE = "SLIME_GUARD_FD"
TMPDIR = "TMPDIR"
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
SHORTEST_BASE = Path("/tmp")
_LONGEST_BASE = 36  # characters: Ray puts sockets into the folder, and the path of a socket has at most 107
_KILL_TIMEOUT_S = 5.0
_TAIL_BYTES = 64 * 1024
_NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind")
"""Lines that Triton leaves after the traceback of each interpreter that imported it."""
_SHARED_MEMORY = Path("/dev/shm")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# Name prefixes of SGLang's tables and queues, and of the semaphores and blocks of multiprocessing. Files that other
# programs share with a server, such as weights, have other names and must survive.
_MADE_BY_SERVERS = ("sglang_loads_", "sgl_shm_mq_", "sem.mp-", "psm_")


def temporary_base() -> Path:
    """The folder of temporary folders: that of ``RAY_TMPDIR`` or ``TMPDIR``, unless it is too long for sockets."""
    chosen = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    return chosen if len(str(chosen)) <= _LONGEST_BASE else SHORTEST_BASE


def temporary_variables(folder: Path | str) -> dict[str, str]:
    """Environment of processes whose temporary files belong into ``folder``."""
    # torch's default for compiled kernels is a folder in TMPDIR, but later runs need them as well.
    cache = Path.home() / ".cache" / "slime" / "torchinductor"
    return {TMPDIR: str(folder), _INDUCTOR: os.environ.get(_INDUCTOR, str(cache))}


class GuardedProcess:
    """Child process in a separate session with its output in a file. The child must call :func:`watch_owner`."""

    def __init__(
        self, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        self.log_path = log_path
        self._stopping = threading.Lock()
        self._is_stopped = False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._guard = os.pipe()  # not inheritable: other children must not hold the write end open
        self._folder = tempfile.mkdtemp(prefix="slime-process-", dir=temporary_base())
        guard = {GUARD_FD_VARIABLE: f"{read_end}:{self._folder}"}
        environment = dict(os.environ) | temporary_variables(self._folder) | dict(env or {}) | guard
        try:
            with log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    list(argv),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end, *pass_fds),
                    start_new_session=True,
                )
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the child runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Kill the child and its process group. Further calls do nothing."""
        with self._stopping:
            if self._is_stopped:
                return  # the pid and the descriptor may have been reused since
            self._is_stopped = True
        kill_group(self._process.pid, reap=self._process.poll)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
        with contextlib.suppress(OSError):
            os.close(self._guard)
        shutil.rmtree(self._folder, ignore_errors=True)


def watch_owner(*, in_child: bool = False, before_end: Callable[[], None] | None = None) -> None:
    """In a guarded child: end this process when its owner ends. Does nothing in other processes.

    Args:
        in_child: watch from a forked process, for programs whose native code never lets another Python thread run.
        before_end: cleanup before the kill.
    """
    # pop: children of this process must not interpret the number of a descriptor that they do not have
    guard = os.environ.pop(GUARD_FD_VARIABLE, None)
    if guard is None:
        return
    descriptor, _, folder = guard.partition(":")

    def clean_up() -> None:
        if before_end is not None:
            before_end()
        shutil.rmtree(folder, ignore_errors=True)

    if not in_child:
        watch_descriptor(int(descriptor), clean_up)
    elif os.fork() == 0:
        _kill_group_when_closed(int(descriptor), clean_up)


def watch_descriptor(descriptor: int, before_end: Callable[[], None] | None = None) -> None:
    """Kill this process's group as soon as the other end of ``descriptor`` is closed."""

    threading.Thread(
        target=_kill_group_when_closed, args=(descriptor, before_end), name="slime-owner-watch", daemon=True
    ).start()


def _kill_group_when_closed(descriptor: int, before_end: Callable[[], None] | None = None) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):  # returns b"" when the owner's end is closed
            pass
    try:
        _unlink_shared_memory(_shared_memory_of(os.getpgrp()))
        if before_end is not None:
            before_end()
    finally:
        os.killpg(0, signal.SIGKILL)  # this process included


def kill_group(leader: int, reap: Callable[[], object] | None = None) -> None:
    """SIGKILL the process group of ``leader`` and wait until all of it has ended, at most five seconds.

    Args:
        reap: collects the exit status of a leader that is a child of this process. Without it the status is lost.
    """
    # Not SIGSTOP first: if this process is killed meanwhile, the group stays stopped. Its own watch cannot run, its
    # sockets stay open, and requests to it never end.
    names = _shared_memory_of(leader)  # before the kill: a dead process has no mappings
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    _unlink_shared_memory(names)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        # A leader that is a child of this process stays a zombie until its status is read.
        if reap is not None:
            reap()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(leader, os.WNOHANG)
        if not _has_living(leader):
            return
        time.sleep(0.02)


def _shared_memory_of(leader: int) -> set[str]:
    """Names of the private files of servers that only the processes of this group have mapped."""
    members: list[int] = []
    others: list[int] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            (members if os.getpgid(pid) == leader else others).append(pid)
    names = {name for pid in members for name in mapped_files(pid, _SHARED_MEMORY)}
    names = {name for name in names if name.startswith(_MADE_BY_SERVERS)}
    for pid in others if names else ():
        names -= mapped_files(pid, _SHARED_MEMORY)
    return names


def _unlink_shared_memory(names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (_SHARED_MEMORY / name).unlink()


def mapped_files(pid: int, directory: Path) -> set[str]:
    """Names of the files directly in ``directory`` that the process has mapped. Empty if the process has ended."""
    prefix = f"{directory}/"
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        # By inode and not by the name in the map: a semaphore is mapped before it gets its name.
        inodes = {int(line.split(maxsplit=5)[4]) for line in lines if prefix in line}
        return {entry.name for entry in os.scandir(directory) if entry.inode() in inodes} if inodes else set()
    except OSError:
        return set()


def _has_living(leader: int) -> bool:
    """Whether a process of the group of ``leader`` is still running."""
    try:
        os.killpg(leader, 0)  # also succeeds if the group has only zombies
    except (ProcessLookupError, PermissionError):
        return False
    return any(_lives_in(leader, pid) for pid in psutil.pids())


def _lives_in(leader: int, pid: int) -> bool:
    try:
        return os.getpgid(pid) == leader and not has_ended(psutil.Process(pid))
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def has_ended(process: psutil.Process) -> bool:
    """Whether ``process`` has ended. True for zombies."""
    # Orphans stay zombies until init reaps them. The first process of a container may take seconds or never do it.
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def work_of(process: psutil.Process) -> tuple[float, int]:
    """Seconds of processor time of a process with its ended children, and the bytes that it has read.

    Raises:
        psutil.Error: it has ended.
    """
    cpu_s = sum(process.cpu_times()[:4])
    try:
        counted = process.io_counters()
    except (AttributeError, OSError, psutil.AccessDenied):  # some kernels of containers do not count bytes
        return cpu_s, 0
    # read_chars misses files in mapped memory, read_bytes those in the page cache
    return cpu_s, max(counted.read_chars, counted.read_bytes)


def tail(path: Path, num_bytes: int) -> str:
    """The last ``num_bytes`` of a file as text. Raises ``OSError``."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read().decode("utf-8", errors="replace")  # the cut may split a character


def log_tail(path: Path, lines: int = 30) -> str:
    """The last lines of a log, indented. A note if the log is missing or empty."""
    try:
        text = tail(path, _TAIL_BYTES).strip()
    except OSError as error:
        return f"    (no log: {error})"
    if not text:
        return f"    ({path} is empty)"
    kept = [line for line in text.splitlines() if not _NOISE.match(line)]
    return "\n".join("    " + line for line in kept[-lines:])


def num_cpus() -> int:
    """CPUs that this process may use, or the quota of its container if that is less."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        return min(allowed, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no control group, or "max"
        return allowed
