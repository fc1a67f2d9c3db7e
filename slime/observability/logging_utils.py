"""Process-wide logging set-up, and the public tracking verbs that custom drivers call.

``configure_logger`` is called once per process by the drivers and every actor. ``init_tracking``, ``log`` and
``finish_tracking`` access one process-wide :class:`~slime.observability.tracking.Tracker`. The loop of slime owns its
tracker and does not use them.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime.utils.errors import reported

if TYPE_CHECKING:
    from slime.observability.tracking import Tracker

__all__ = ["collecting", "configure_logger", "finish_tracking", "init_tracking", "log"]

logger = logging.getLogger(__name__)


_LOGGER_CONFIGURED = False
_TRACKER: Tracker | None = None
_COLLECTORS: list[_Collector] = []
_HAS_WARNED = False


class LineFormatter(logging.Formatter):
    """``[time{prefix}] LEVEL file.py:line - message``. Further lines of a message are indented by four spaces.

    ``slime.observability.run_log`` finds the warnings of other processes by this form.
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
