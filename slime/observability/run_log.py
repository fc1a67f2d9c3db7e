"""``run.log`` in the run's folder: every line that the driver and the actors of a run log or print.

Lines of actors come from ``slime.ray.run.worker_logs``. Warnings and errors also go to the terminal, without the time.
A warning that several processes log, such as all ranks of a trainer, is shown once. Engines and routers have a log
each in the folder ``engines``.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from slime.observability.logging_utils import LineFormatter
from slime.observability.terminal import SHOWN_LINES, TERMINAL
from slime.utils.errors import reported

FILE = "run.log"

_MOST_WAITING = 10_000  # lines before the folder is known
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LINE = re.compile(r"\[[\d-]+ [\d:]+ ?(?P<who>[^\]]*)\] (?P<level>[A-Z]+) (?P<place>\S+) - (?P<text>.*)")
_SHOWN = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}
_NUMBERS = re.compile(r"\d+")


class RunLog:
    """The log of the run of this process. Lines wait in memory until the run has its folder.

    Attributes:
        path: None before :meth:`open`.
        shows_prints: whether the terminal shows the text that actors print.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.shows_prints = False
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        # (actor -> whether its last line is on the terminal), (place and text of a warning -> actor that logged it)
        self._is_shown: dict[str, bool] = {}
        self._first: dict[tuple[str, str], str] = {}

    def open(self, path: Path) -> None:
        """Append to ``path`` from now on. A second call for the same path does nothing.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            if self._file is not None and self.path == path:
                return
            file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            if self._file is not None:
                self._file.close()
            self._file, self.path = file, path
            file.writelines(self._waiting)
            self._waiting.clear()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self.path = None, None
            self._waiting.clear()
            self._is_shown.clear()
            self._first.clear()

    def write(self, lines: Iterable[str]) -> None:
        """Append lines. ANSI codes, and texts that later ones of the same line replace, are left out."""
        texts = [f"{plain(line)}\n" for line in lines]
        with self._lock:
            if self._file is None:
                self._waiting.extend(texts)
                return
            try:
                self._file.writelines(texts)
            except OSError:  # a full disk must not end a healthy run
                self._waiting.clear()

    def from_actor(self, actor: str, lines: Iterable[str], *, is_error: bool = True) -> None:
        """Lines of an actor's standard error, or of its standard output.

        Args:
            actor: class and pid.
        """
        texts = [plain(line) for line in lines]
        self.write(line if _LINE.match(line) or line.startswith("    ") else f"[{actor}] {line}" for line in texts)
        for line in texts:
            if (shown := self._for_terminal(actor, line, is_error)) is not None:
                TERMINAL.line(shown, is_error=True)

    def _for_terminal(self, actor: str, line: str, is_error: bool) -> str | None:
        found = _LINE.match(line)
        if found is None:
            if line.startswith("    ") and self._is_shown.get(actor):  # the warning before it goes on
                return line
            return f"printed: {line}" if self.shows_prints and not is_error and line.strip() else None
        self._is_shown[actor] = False
        if found["level"] not in _SHOWN:
            return None
        key = (found["place"], _NUMBERS.sub("", found["text"]))
        if self._first.setdefault(key, actor) != actor:
            return None
        self._is_shown[actor] = True
        return f"{_SHOWN[found['level']]}: {found['who'] or actor}: {found['text']}"


def plain(line: str) -> str:
    """``line`` as a terminal would show it in the end: no ANSI codes, the last of texts that replace each other."""
    return _ANSI.sub("", line).rstrip("\r\n").rpartition("\r")[2]


RUN_LOG = RunLog()
"""The log of the run that this process drives."""


class _Handler(logging.Handler):
    """Every record to ``run.log``, and warnings to the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        with reported(lambda _: self.handleError(record)):  # as every handler of logging does
            RUN_LOG.write(self.format(record).splitlines())
            if record.name == SHOWN_LINES:
                TERMINAL.line(record.getMessage())
            elif record.levelno >= logging.WARNING:
                level = "warning" if record.levelno < logging.ERROR else "error"
                TERMINAL.line(f"{level}: {record.getMessage()}", is_error=True)


@contextmanager
def driver_logs() -> Iterator[None]:
    """Inside the block the log records of this process go to ``run.log``, and to the terminal from WARNING on."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    ours = _Handler()
    ours.setFormatter(LineFormatter(" driver"))
    root.handlers[:] = [ours]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        RUN_LOG.close()
