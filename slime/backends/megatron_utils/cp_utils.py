"""Public name of :mod:`slime.backends.training.context_parallel`."""

from slime.backends.training.context_parallel import (
    ShardedSequences,
    Sharding,
    gather_responses,
    shard,
    zigzag_rows,
)

__all__ = ["ShardedSequences", "Sharding", "gather_responses", "shard", "zigzag_rows"]
