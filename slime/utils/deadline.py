"""Waiting with an end: every wait in slime has a deadline and a name."""

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
        seconds: how long the wait may take, in seconds.
        what: what is waited for; completes the sentence "gave up after N s waiting for ...".
        fix: what the reader of the error can do about it.
    """

    seconds: float
    what: str
    fix: str = ""
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
        """What a wait does between two looks. Raises when the time is over, or the run was asked to end."""
        raise_if_interrupted()
        if self.elapsed > self.seconds:
            raise self.error(detail)


def wait_until(ready: Callable[[], bool], deadline: Deadline, poll_s: float = 0.05) -> None:
    """Call ``ready`` until it returns true. Raises :class:`DeadlineExceeded` when the deadline passes first."""
    while not ready():
        deadline.check()
        time.sleep(min(poll_s, deadline.remaining))
