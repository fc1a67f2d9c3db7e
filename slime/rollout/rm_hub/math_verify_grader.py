"""``--rm-type math_verify``: grading with the math-verify library, which knows sets, percentages and powers.

The library computes what a response says, and ``9^{9^{9^9}}`` is computed in C, where no thread can be interrupted and
no other one runs. So it works in processes of its own (``math_verify_worker``), which end themselves when a response
takes too long: the limit is on the grading alone, not on the wait for a free process. A few are started when they are
needed; they end with this process, whose pipe they read.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

from slime.utils.errors import DataError, ScoringError

__all__ = ["LONGEST_CALL_S", "grade_math_verify"]

logger = logging.getLogger(__name__)

_LIMIT_S = 5.0
_WAIT_S = 1800.0
"""For a free process. Many responses wait at a time, and each before them may take its limit."""
_START_S = 120.0
LONGEST_CALL_S = _WAIT_S + _START_S + 2 * _LIMIT_S
"""After which :func:`grade_math_verify` has returned."""
_MAX_CHARS = 10_000
"""The answer stands at the end; what a model repeats before it would only cost time."""
_MAX_PROCESSES = 8


class _Grader:
    """One process that grades a response at a time."""

    def __init__(self) -> None:
        worker = Path(__file__).with_name("math_verify_worker.py")
        command = [sys.executable, "-P", str(worker), str(_START_S)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._read() != "ready":
            self.close()
            raise DataError("--rm-type math_verify: its process did not start; what it printed says why")

    def grade(self, response: str, truth: str, limit_s: float) -> float | None:
        """The grade; None when the process ended instead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([response, truth, limit_s]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._read()
        return float(line) if line else None

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _num_processes() -> int:
    return min(_MAX_PROCESSES, os.cpu_count() or 1)


@functools.cache
def _graders() -> queue.SimpleQueue[_Grader | None]:
    """The processes that are free; None stands for one that was not started yet."""
    free: queue.SimpleQueue[_Grader | None] = queue.SimpleQueue()
    for _ in range(_num_processes()):
        free.put(None)
    return free


def grade_math_verify(response: str, label: Any, limit_s: float = _LIMIT_S) -> float:
    """1.0 when the answer in ``response`` equals ``label``, else 0.0; also where that takes longer than ``limit_s``, of
    which five seconds are the most.

    Waits for a free process: call it in a thread.

    Raises:
        DataError: the library is missing.
        ScoringError: no process became free in time.
    """
    if label is None or label == "":
        return 0.0
    if importlib.util.find_spec("math_verify") is None:
        raise DataError("--rm-type math_verify needs the package math-verify: pip install math-verify")
    truth = str(label)
    truth = truth if "$" in truth or "\\boxed" in truth else f"${truth}$"
    limit_s = min(limit_s, _LIMIT_S)
    free = _graders()
    try:
        grader = free.get(timeout=_WAIT_S)
    except queue.Empty as error:
        raise ScoringError(
            f"--rm-type math_verify: none of its {_num_processes()} processes was free for {_WAIT_S:g} s. Each "
            "response may take five seconds; a machine with more CPU cores has more of them"
        ) from error
    grade: float | None = None
    try:
        grader = grader or _Grader()
        grade = grader.grade(response[-_MAX_CHARS:], truth, limit_s)
        if grade is None:
            logger.warning("--rm-type math_verify had no grade for label %.100r within %g s: 0", label, limit_s)
            grader.close()
    finally:
        free.put(None if grade is None else grader)
    return grade or 0.0
