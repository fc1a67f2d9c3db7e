"""Public alias of the data-parallel schedule; it lives in ``slime.batch.schedule``."""

from __future__ import annotations

from slime.batch.schedule import build_dp_schedule

__all__ = ["build_dp_schedule"]
