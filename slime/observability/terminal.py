"""The terminal of the driver: lines, and below them one line that is replaced in place.

Redirected output has the lines only, without ANSI codes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WIDE = 100
NARROW = 80

SHOWN_LINES = "slime.observability.shown_lines"
"""Logger whose records the terminal shows as they are."""

_CLEAR = "\r\x1b[K"
_DRAW_EVERY_S = 0.5


class Terminal:
    """Standard output and standard error of this process. Any thread may write."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._status = ""

    @property
    def is_live(self) -> bool:
        """Whether a line can be replaced in place."""
        return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    @property
    def width(self) -> int:
        """Columns that lines may use: ``WIDE``, or ``NARROW`` in a narrower terminal."""
        if not self.is_live:
            return WIDE
        return WIDE if shutil.get_terminal_size((WIDE, 24)).columns >= WIDE else NARROW

    def line(self, text: str, *, is_error: bool = False) -> None:
        """Write ``text`` and a line end, above the line in place."""
        with self._lock:
            self._draw("")
            print(text, file=sys.stderr if is_error else sys.stdout, flush=True)
            self._draw(self._status)

    def status(self, text: str) -> None:
        """Replace the line in place. The empty text removes it."""
        with self._lock:
            self._status = text
            self._draw(text)

    def _draw(self, text: str) -> None:
        if self.is_live:
            # A longer text would wrap, and the next clear would remove only its last part.
            columns = shutil.get_terminal_size((NARROW, 24)).columns - 1
            sys.stdout.write(_CLEAR + text[:columns])
            sys.stdout.flush()

    @contextmanager
    def live(self, text: Callable[[], str]) -> Iterator[None]:
        """Keep the line in place up to date in the block. Without a terminal ``text`` is never called."""
        if not self.is_live:
            yield
            return
        ended = threading.Event()

        def draw() -> None:
            while not ended.wait(_DRAW_EVERY_S):
                self.status(text())

        thread = threading.Thread(target=draw, name="slime-terminal", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.status("")


TERMINAL = Terminal()
