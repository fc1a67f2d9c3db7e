"""A thread that writes files while its process goes on: one job after the other, in the order in which they came.

    caller                      thread                  what holds
    submit ──▶ queue of 8 ────▶ job()                   a full queue makes the caller wait, up to a deadline
    flush  ──────────────────▶ all jobs before it done  also at the exit of the process, SIGTERM's included

Called by the rollout manager for its records. What a job raises is the job's own business: it is logged here and ends
nothing. A process that is killed with SIGKILL loses the jobs it had not come to.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["BackgroundWriter"]

logger = logging.getLogger(__name__)

_ROOM = 8
"""Jobs that may wait: rollouts that the disk may be behind before the run is slowed down."""
_ROOM_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 10.0


class BackgroundWriter:
    """The thread is started by the first job."""

    def __init__(self, room: int = _ROOM) -> None:
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue(room)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], object], timeout_s: float = _ROOM_TIMEOUT_S) -> None:
        """Have ``job`` done soon.

        Raises:
            TimeoutError: the jobs before it have not been done for ``timeout_s`` seconds.
        """
        self._start()
        try:
            self._jobs.put(job, timeout=timeout_s)
        except queue.Full:
            raise TimeoutError(f"{self._jobs.maxsize} files have waited for the disk for {timeout_s:g} s") from None

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was submitted before is done. Returns whether it is."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        ends = time.monotonic() + timeout_s
        try:
            self._jobs.put(is_done.set, timeout=timeout_s)
        except queue.Full:
            return False
        return is_done.wait(max(0.0, ends - time.monotonic()))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                # a daemon, so that a disk that hangs cannot keep a process that has come to its end
                self._thread = threading.Thread(target=self._work, name="background writer", daemon=True)
                self._thread.start()
                atexit.register(self._finish)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                logger.exception("a file could not be written")

    def _finish(self) -> None:
        if not self.flush(_EXIT_TIMEOUT_S):
            logger.warning("files of this process were not written in %g s; the last ones are lost", _EXIT_TIMEOUT_S)
