"""Public alias: ``from slime.utils.timer import Timer, timer``."""

from __future__ import annotations

from slime.observability.timer import Timer, inverse_timer, timer

__all__ = ["Timer", "inverse_timer", "timer"]
