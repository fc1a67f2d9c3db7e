"""Deadlines and interrupts of waits. Every wait in slime has a deadline and a name.

Ctrl-C and SIGTERM raise an exception and also set a flag. Every wait checks the flag at least once a second
(``Deadline.check``), and so does every step of the loop. The driver installs the handlers for the duration of a run. In
other processes the flag is never set.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from slime.utils.errors import DeadlineExceeded


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
    started: float = field(default_factory=lambda: time.monotonic())  # looked up at each call: tests replace the clock

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


# Signals within this time after the first one count as the same one: make, uv and timeout forward the signal that the
# terminal has already sent to the whole process group.
_FORWARDED_S = 1.0

# The exception alone can get lost: Python raises it at the current line of the main thread. In a __del__ or a callback
# of native code (Ray has both) it is printed and dropped, and the run would continue.
_noted: list[int] = []


class Interrupted(KeyboardInterrupt):
    """The first Ctrl-C or SIGTERM of a run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # exit status of the shell convention


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block the first Ctrl-C or SIGTERM raises :class:`Interrupted`; the second ends the process at once.

    Main thread only: Python installs signal handlers in no other thread.
    """
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if first and now > first[0] + _FORWARDED_S:
            # not print: the handler may have interrupted a write to the same buffered stream
            os.write(2, b"interrupted again: ended without waiting for anything.\n")
            os._exit(128 + number)
        if not first:
            first.append(now)
            _noted.append(number)
            raise Interrupted(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        acknowledge()
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raise :class:`Interrupted` from the first signal until :func:`acknowledge`."""
    if _noted:
        raise Interrupted(_noted[0])


def acknowledge() -> None:
    """Clear the flag, so that the waits of an orderly shutdown are not interrupted."""
    _noted.clear()
