"""Public alias of the compute estimate; it lives in ``slime.batch.flops``."""

from __future__ import annotations

from slime.batch.flops import calculate_fwd_flops

__all__ = ["calculate_fwd_flops"]
