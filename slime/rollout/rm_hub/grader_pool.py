"""Grading of model output in processes that the kernel can end (``grader_process``).

Python computes ``9^{9^{9^9}}`` in C code that holds the GIL: nothing can interrupt it, and no other thread runs. Every
built-in rule that computes with a response (sympy, LaTeX parsers, math-verify, IFBench) calls :func:`grade_in_process`.
Rules that only compare text take time proportional to its length, and run here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import DataError, ScoringError
from slime.utils.process import num_cpus

logger = logging.getLogger(__name__)

MAX_CHARS = 10_000
"""Answers with more characters are not computed with."""
# Per answer. CPU time, so that a grade does not depend on the load of the machine.
_MAX_CPU_S = 5.0
_MAX_WALL_S = 60.0
# Wait for a free process. Many responses wait at the same time, and each before them may take its limit.
_WAIT_S = 1800.0
# Importing the libraries in the first call.
_START_S = 120.0
_END_S = 10.0
LONGEST_CALL_S = _WAIT_S + _START_S + 2 * _MAX_WALL_S
""":func:`grade_in_process` returns within this time, unless its limit is longer."""
_MAX_PROCESSES = 32
_COMPUTING_RULES = frozenset({"math", "deepscaler", "math_verify", "ifbench"})


@dataclass
class GradeLimit:
    """Limits of grading one answer.

    Attributes:
        wall_s: seconds (``--rm-timeout``), the wait for a free process not included; at most 5 of them on the CPU.
        stopped: the reason why the answer has no grade; None if it has one.
    """

    wall_s: float = _MAX_WALL_S
    stopped: str | None = None


_limit: ContextVar[GradeLimit | None] = ContextVar("grade_limit", default=None)


@contextlib.contextmanager
def grade_limit(wall_s: float) -> Iterator[GradeLimit]:
    """The limit of an answer that is graded within, also by threads that copy the context."""
    limit = GradeLimit(wall_s)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


class _Pool:
    """One process that has the libraries, and as many forks of it as may grade at the same time."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.num_processes = _num_processes()
        pairs = [socket.socketpair() for _ in range(self.num_processes)]
        numbers = [theirs.fileno() for _, theirs in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime.rollout.rm_hub.grader_process", ",".join(map(str, numbers))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C is for this process alone
            # The child must find slime and users' packages. One thread, because the pool already uses several
            # processes.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
        self._closing = threading.Lock()
        self._free: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        for ours, theirs in pairs:
            # The fork must hold the only copy: otherwise its end would not close the connection.
            theirs.close()
            self._free.put(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_free(self) -> socket.socket | None:
        """The connection to a process that is free; None when they have ended.

        Raises:
            queue.Empty: none was free in time.
        """
        connection = self._free.get(timeout=_WAIT_S)
        if connection is None:
            self._free.put(None)  # for the next waiting thread
        return connection

    def ask(self, connection: socket.socket, request: Sequence[Any], wall_s: float) -> dict[str, Any]:
        """Send a request and return the answer; then the process is free again. Raises OSError if it has ended."""
        try:
            connection.settimeout(_START_S + wall_s)  # the libraries may have to be loaded first
            connection.sendall(json.dumps(request, default=str).encode() + b"\n")
            with connection.makefile("r") as lines:
                line = lines.readline()
            if not line:
                raise OSError(f"the grader process {self.pid} has ended (its messages are in the log above)")
        except OSError:
            # All processes end: after a timeout the late answer would be read as the answer to the next request.
            self.close()
            raise
        self._free.put(connection)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the processes, and every wait for one. Threads whose answers failed together may all call it."""
        with self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_END_S)  # closes its standard input: it ends its forks, and itself
            self._process.kill()
            self._process.wait()
        self._free.put(None)


def _num_processes() -> int:
    """Half of the CPUs, at most 32: engines and trainers need the other cores, and each answer is short."""
    return min(_MAX_PROCESSES, max(2, num_cpus() // 2))


_lock = threading.Lock()
_current: _Pool | None = None


def _pool() -> _Pool:
    """The processes of this process, started on first use."""
    global _current
    with _lock:
        # After a fork parent and child would read each other's answers from the same sockets.
        if _current is None or _current.owner != os.getpid():
            _current = _Pool()
        return _current


def _forget(pool: _Pool) -> None:
    global _current
    with _lock:
        if _current is pool:
            _current = None


def preload_graders(rm_type: str | None) -> None:
    """Start the processes if this reward needs them. They import its libraries while the engines start."""
    if (rm_type or "").removeprefix("boxed_") in _COMPUTING_RULES:
        _pool()


def grade_in_process(grader: str, arguments: Sequence[Any]) -> Any:
    """Return the result of ``grader`` (a name in ``grader_process``), or None if it exceeded a limit or died.

    Blocks until a process is free: call it in a thread. The limits are those of :func:`grade_limit`, which also has the
    reason of a None.

    Raises:
        DataError: the library of the grader is missing.
        ScoringError: the grader raised, no process became free in time, or the processes were ended from outside.
    """
    limit = _limit.get() or GradeLimit()
    request = [grader, arguments, min(limit.wall_s, _MAX_CPU_S), limit.wall_s]
    pool = _pool()
    try:
        while (connection := pool.wait_free()) is None:
            # Another thread ended these processes.
            _forget(pool)
            pool = _pool()
        answer = pool.ask(connection, request, limit.wall_s)
    except queue.Empty as error:
        raise ScoringError(
            f"none of the {pool.num_processes} grader processes was free for {_WAIT_S:g} s. Each response may take "
            f"{_MAX_CPU_S:g} s of CPU time; a machine with more CPU cores has more of them"
        ) from error
    except OSError as error:
        _forget(pool)
        raise ScoringError(f"grader {grader}: {error}; the next answer starts new ones") from error
    if "error" in answer:
        raise (DataError if answer["is_import"] else ScoringError)(f"grader {grader}: {answer['error']}")
    limit.stopped = answer.get("stopped")
    if limit.stopped:
        logger.warning("grader %s gave no grade, which counts as wrong: %s. %.200r", grader, limit.stopped, arguments)
    return answer.get("grade")
