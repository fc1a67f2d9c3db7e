"""Context parallelism for users' functions: public name of ``slime.backends.training.context_parallel``, and the verbs
that importance weights and reducers written elsewhere call.

What slime gives to a user's function is whole on every context-parallel rank: nothing has to be gathered or cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from slime.algorithms.reduce import Reducer, make_reducer
from slime.backends.training.context_parallel import (
    ShardedSequences,
    Sharding,
    gather_responses,
    shard,
    zigzag_rows,
)

__all__ = [
    "ShardedSequences",
    "Sharding",
    "all_gather_with_cp",
    "gather_responses",
    "get_sum_of_sample_mean",
    "shard",
    "slice_log_prob_with_cp",
    "zigzag_rows",
]

Values = TypeVar("Values", torch.Tensor, list[float])


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """``tensor``, one value per response token of a sample, which is whole already."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int) -> Values:
    """``log_prob``: every rank works with the whole response."""
    return _whole(log_prob, response_length)


def _whole(values: Values, response_length: int) -> Values:
    if len(values) != response_length:
        raise ValueError(f"expected the {response_length} values of a whole response, got {len(values)}")
    return values


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """See :func:`slime.algorithms.reduce.make_reducer`.

    Args:
        total_lengths: not needed.
        sample_denoms: what each sample's sum is divided by; its own trained tokens where nothing is said.
    """
    if sample_denoms is None:
        sample_denoms = [mask.sum() for mask in loss_masks]
    if not isinstance(sample_denoms, torch.Tensor):
        sample_denoms = torch.tensor([float(denom) for denom in sample_denoms])
    return make_reducer(response_lengths, loss_masks, sample_denoms, per_token=calculate_per_token_loss)
