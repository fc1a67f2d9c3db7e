"""Deadlines of waits. Every wait in slime has a deadline and a name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slime.utils.errors import DeadlineExceeded
from slime.utils.interrupt import raise_if_interrupted


@dataclass
class Deadline:
    """A moment after which waiting is an error.

    Attributes:
        seconds: longest duration of the wait.
        what: the awaited event. Completes the sentence "gave up after N s waiting for ...".
        fix: advice for the reader of the error.
    """

    seconds: float
    what: str
    fix: str = ""
    # monotonic: a corrected wall clock must not end or prolong a wait
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed)

    def error(self, detail: str = "") -> DeadlineExceeded:
        parts = [f"gave up after {self.elapsed:.1f} s waiting for {self.what}", detail, self.fix]
        return DeadlineExceeded(". ".join(part.rstrip(".") for part in parts if part))

    def check(self, detail: str = "") -> None:
        """Raise if the time is over or the run was interrupted. Call this between two polls of a wait."""
        raise_if_interrupted()  # before the time: an interrupt must not be reported as a timeout
        if self.elapsed > self.seconds:
            raise self.error(detail)


def wait_until(ready: Callable[[], bool], deadline: Deadline, poll_s: float = 0.05) -> None:
    """Call ``ready`` until it returns true. Raises :class:`DeadlineExceeded` when the deadline passes first."""
    while not ready():
        deadline.check()
        time.sleep(min(poll_s, deadline.remaining))
