"""Public alias: ``from slime.utils.logging_utils import init_tracking``."""

from __future__ import annotations

from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, log

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]
