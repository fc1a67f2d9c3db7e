"""Where a rank stands among those that train, as far as work that knows no model needs to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["RankPlace"]


@dataclass(frozen=True)
class RankPlace:
    """One rank.

    Attributes:
        dp_rank, dp_size: data-parallel ranks, context parallelism not counted; ``dp_group`` is their group.
        cp_size: ranks that share every sequence.
        tensor_group: ranks that share the vocabulary; None for one rank, which needs no collectives.
        is_main: the one rank that reports the steps.
        keeps_batch: the one rank of those with the same samples that writes them down.
    """

    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup | None
    cp_size: int = 1
    is_main: bool = True
    keeps_batch: bool = True
    tensor_group: dist.ProcessGroup | None = None
