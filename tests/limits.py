"""Time limits that catch a hang and not a slow machine: a second counts less while the cores are shared.

``unloaded_time`` advances by ``dt / (slowness * max(1, runnable threads / cores))`` during ``dt`` seconds. Linux
reports the runnable threads of all processes in ``/proc/loadavg``. ``slowness`` compares this CPU with the one on which
the limits were chosen, by the CPU time of a fixed loop. All limits of tests use this clock, also pytest's ``timeout``.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from subprocess import Popen
from time import monotonic, sleep  # a test may replace those of the module

__all__ = ["Limit", "unloaded_time", "wait_for_exit"]

_SAMPLE_S = 0.2
_REFERENCE_S = 0.02
"""CPU seconds of :func:`_loop` on the machine on which the limits were chosen."""


class Limit:
    """The limit of a wait, in seconds of a machine that does nothing else."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = unloaded_time()

    @property
    def used(self) -> float:
        """Seconds since the construction."""
        return unloaded_time() - self._started

    @property
    def is_over(self) -> bool:
        return self.used > self.seconds


def unloaded_time() -> float:
    """Seconds of an otherwise idle machine since the first call in this process. The origin has no meaning."""
    global _clock
    if _clock is None or _clock.pid != os.getpid():  # a thread does not survive a fork
        _clock = _Clock()
    return _clock.now


def wait_for_exit(process: Popen[bytes] | Popen[str], seconds: float) -> int | None:
    """Exit status of ``process``, or None if it still runs after ``seconds`` of an otherwise idle machine."""
    limit = Limit(seconds)
    while (status := process.poll()) is None and not limit.is_over:
        sleep(0.02)
    return status


class _Clock:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.now = 0.0
        self._slowness = max(1.0, min(_loop() for _ in range(3)) / _REFERENCE_S)
        self._cores = len(os.sched_getaffinity(0))
        threading.Thread(target=self._run, daemon=True, name="unloaded clock").start()

    def _run(self) -> None:
        before = monotonic()
        while True:
            sleep(_SAMPLE_S)
            runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1  # this thread
            now = monotonic()
            self.now += (now - before) / (self._slowness * max(1.0, runnable / self._cores))
            before = now


def _loop() -> float:
    started = time.thread_time()
    total = 0
    for number in range(500_000):
        total += number * number & 7
    return time.thread_time() - started


_clock: _Clock | None = None
