"""The log of a process, ``run.log`` of a run, and the public tracking verbs that custom drivers call.

``configure_logger`` is called once per process by the drivers and every actor. ``run.log`` in the run's folder has
every line that the driver and the actors of a run log or print. Lines of actors come from
``slime.ray.run.cluster``. Warnings and errors also go to the terminal, without the time. A warning that several
processes log, such as all ranks of a trainer, is shown once. Engines and routers have a log each in the folder
``engines``.

``init_tracking``, ``log`` and ``finish_tracking`` access one process-wide
:class:`~slime.observability.tracking.Tracker`. The loop of slime owns its tracker and does not use them.
"""

from __future__ import annotations

import logging
import re
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from slime.observability.terminal import SHOWN_LINES, TERMINAL
from slime.utils.errors import reported

if TYPE_CHECKING:
    from slime.observability.tracking import Tracker

logger = logging.getLogger(__name__)

LOG_FILE = "run.log"

_MOST_WAITING = 10_000  # lines before the folder is known
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LINE = re.compile(r"\[[\d-]+ [\d:]+ ?(?P<who>[^\]]*)\] (?P<level>[A-Z]+) (?P<place>\S+) - (?P<text>.*)")
_SHOWN = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}
_NUMBERS = re.compile(r"\d+")
_LOGGER_CONFIGURED = False


class LineFormatter(logging.Formatter):
    """``[time{prefix}] LEVEL file.py:line - message``. Further lines of a message are indented by four spaces.

    :class:`RunLog` finds the warnings of other processes by this form.
    """

    def __init__(self, prefix: str = "") -> None:
        # The prefix becomes a part of a %-format.
        head = f"[%(asctime)s{prefix.replace('%', '%%')}] %(levelname)s %(filename)s:%(lineno)d"
        super().__init__(f"{head} - %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n    ")


def configure_logger(prefix: str = "") -> None:
    """Log lines (:class:`LineFormatter`) at level INFO. Later calls in the same process do nothing."""
    global _LOGGER_CONFIGURED
    if _LOGGER_CONFIGURED:
        return
    _LOGGER_CONFIGURED = True
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(prefix))
    # force: a library may have configured the root logger before.
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore"):  # one line per request otherwise
        logging.getLogger(chatty).setLevel(logging.WARNING)


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


_TRACKER: Tracker | None = None
_COLLECTORS: list[_Collector] = []
_HAS_WARNED = False


def init_tracking(args: Namespace, primary: bool = True, **kwargs: Any) -> None:
    """Open the trackers that ``args`` asks for. Only the primary process (the driver) writes."""
    global _TRACKER
    if primary and _TRACKER is None:
        from slime.observability.tracking import create_tracker

        _TRACKER = create_tracker(args)


def log(args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
    """Write ``metrics``, which hold their step under ``step_key``.

    In the process that called ``init_tracking``, or below :func:`collecting`: in rollout, evaluation and log functions.
    Elsewhere they are lost, with a warning.
    """
    global _HAS_WARNED
    target = _COLLECTORS[-1] if _COLLECTORS else _TRACKER
    if target is not None:
        target.log(metrics, step_key)
    elif not _HAS_WARNED:
        _HAS_WARNED = True
        names = ", ".join(name for name in metrics if name != step_key)
        logger.warning("metrics are lost, because this process has no tracker: %s", names)


class _Collector:
    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        self.metrics |= {name: value for name, value in metrics.items() if name != step_key}


@contextmanager
def collecting() -> Iterator[dict[str, Any]]:
    """Collect the metrics that the block logs, without their steps, instead of writing them.

    For functions of the user that run in a process other than the driver's: the caller sends the metrics there. Of
    blocks in several threads the last one that began gets the metrics of all.
    """
    collector = _Collector()
    _COLLECTORS.append(collector)
    try:
        yield collector.metrics
    finally:
        _COLLECTORS.remove(collector)


def finish_tracking(args: Namespace) -> None:
    """Close the trackers. Never raises."""
    global _TRACKER
    tracker, _TRACKER = _TRACKER, None
    if tracker is not None:
        with reported(lambda _: logger.exception("closing the trackers failed")):
            tracker.close()
