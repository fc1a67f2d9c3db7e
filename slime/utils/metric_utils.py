"""Public alias: ``from slime.utils.metric_utils import compute_statistics``."""

from __future__ import annotations

from slime.observability.metric_utils import (
    compression_ratio,
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)

__all__ = [
    "compression_ratio",
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
