"""Ctrl-C and SIGTERM as something that every wait looks at, because the exception alone can get lost.

Python raises it wherever the main thread happens to be. In a ``__del__`` or a callback of native code, as Ray has, it
is printed and forgotten, and the run would go on. So the handlers also leave a note: waits look at it once a second at
least (``Deadline.check``), and so does every step of the loop.

Used by the driver around a run. Elsewhere nothing is installed, and there is never a note.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_FORWARDED_S = 1.0
"""Signals that follow the first one so soon are the same one: make, uv and timeout pass on what the terminal sent."""

_noted: list[int] = []


class Interrupted(KeyboardInterrupt):
    """The run was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block the first Ctrl-C or SIGTERM raises :class:`Interrupted`; the second ends the process at once.

    Main thread only, as everything about signals.
    """
    first: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if first and now > first[0] + _FORWARDED_S:
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
    """The run is being stopped: waits that this needs are waited for."""
    _noted.clear()
