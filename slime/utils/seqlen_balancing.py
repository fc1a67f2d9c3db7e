"""Public alias of the number partitioning; it lives in ``slime.batch.balance``."""

from __future__ import annotations

from slime.batch.balance import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
)

__all__ = ["expand_bins_by_splitting", "first_fit_pack", "get_seqlen_balanced_partitions", "karmarkar_karp"]
