"""Context parallelism for users' functions: public name of ``slime.backends.training.context_parallel``, and
the functions that losses, importance weights and reducers written elsewhere call.

A ``--custom-loss-function-path`` gets the part of each response whose logits its rank has. Every other function of the
user gets whole responses. The functions here follow ``seen_as``: whole responses are neither gathered nor cut. Outside
of users' functions they describe Megatron's context-parallel rank. Importable without megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from slime.algorithms.reduce import Reducer, make_reducer
from slime.backends.training.context_parallel import (
    WHOLE,
    ShardedSequences,
    Sharding,
    gather_parts,
    gather_responses,
    held_tokens,
    seen_sharding,
    shard,
    zigzag_rows,
)
from slime.utils.misc import moved

__all__ = [
    "ShardedSequences",
    "Sharding",
    "all_gather_with_cp",
    "current_sharding",
    "gather_responses",
    "get_logits_and_tokens_offset_with_cp",
    "get_sum_of_sample_mean",
    "shard",
    "slice_log_prob_with_cp",
    "slice_with_cp",
    "zigzag_rows",
]

__getattr__ = moved(
    __name__,
    gather_and_reduce_log_dict="slime.compat.measures",
    reduce_train_step_metrics="slime.compat.measures",
    rollout_log_metric_contribution="slime.compat.measures",
)

Values = TypeVar("Values", torch.Tensor, list[float])
Span = tuple[int, int]


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """The whole response ``[R]`` from the rank's part of it. Differentiable. A collective of the ranks."""
    sharding = current_sharding()
    if sharding.cp_size == 1:
        return _whole(tensor, response_length)
    return gather_parts(tensor, [total_length], [response_length], sharding)


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int) -> Values:
    """The rank's part of ``log_prob``, which has a value per token of the whole response."""
    sharding, whole = current_sharding(), _whole(log_prob, response_length)
    if sharding.cp_size == 1:
        return whole
    held = held_tokens([total_length], [response_length], sharding)
    if isinstance(whole, torch.Tensor):
        return whole[held.to(whole.device)]
    return [whole[position] for position in held.tolist()]


def current_sharding() -> Sharding:
    """The division of the responses that the running user function sees, else that of Megatron's ranks."""
    seen = seen_sharding()
    if seen is not None:
        return seen
    # Not imported: this module works without megatron.
    mpu: Any = sys.modules.get("megatron.core.parallel_state")
    size = 1 if mpu is None else mpu.get_context_parallel_world_size()  # 0 before the groups exist
    if size <= 1:
        return WHOLE
    return Sharding(mpu.get_context_parallel_rank(), size, mpu.get_context_parallel_group())


def _whole(values: Values, response_length: int) -> Values:
    if len(values) != response_length:
        raise ValueError(f"expected the {response_length} values of a whole response, got {len(values)}")
    return values


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """Positions of this rank's two chunks in the whole sample. Ends are exclusive.

    Returns:
        The size of a chunk, its two chunks, the rows in them whose logits predict response tokens, and those tokens.
        A chunk without such a row has ``(0, 0)`` in the last two. A function that gets whole responses gets two chunks
        that are the whole sample.

    Raises:
        ValueError: the caller is not a user's function, and one context-parallel rank holds the whole sample.
    """
    sharding = current_sharding()
    rank, size = sharding.cp_rank, sharding.cp_size
    if size == 1 and seen_sharding() is None:
        raise ValueError("get_logits_and_tokens_offset_with_cp: --context-parallel-size is 1, so nothing is cut.")
    chunk = -(-total_length // (2 * size))  # rounded up: the last chunk may end after the sample
    chunks = _span(rank, chunk), _span(2 * size - 1 - rank, chunk)
    rows = tuple(_cut(span, total_length - response_length - 1, total_length - 1) for span in chunks)
    tokens = tuple((first + 1, end + 1) if end else (0, 0) for first, end in rows)
    return chunk, chunks, (rows[0], rows[1]), (tokens[0], tokens[1])


def slice_with_cp(tokens: torch.Tensor, pad_value: float | Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """This rank's two chunks of a sample, concatenated. With one rank the whole sample.

    Args:
        tokens: ``[L, ...]``.
        pad_value: the value that fills the last chunks, or a function of ``tokens`` and a number of rows that returns
            ``tokens`` with as many more.
    """
    rank, size = current_sharding().cp_rank, current_sharding().cp_size
    if size == 1:
        return tokens
    whole = -(-len(tokens) // (2 * size)) * 2 * size
    missing = whole - len(tokens)
    if callable(pad_value):
        tokens = pad_value(tokens, missing)
    elif missing:
        tokens = torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), pad_value)])
    return tokens[zigzag_rows(torch.tensor([0, whole], device=tokens.device), rank, size)]


def _span(index: int, chunk: int) -> Span:
    return index * chunk, (index + 1) * chunk


def _cut(span: Span, first: int, end: int) -> Span:
    low, high = max(span[0], first), min(span[1], end)
    return (low, high) if low < high else (0, 0)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """See :func:`slime.algorithms.reduce.make_reducer`. In a custom loss it reduces the rank's part of the responses.

    Args:
        sample_denoms: divisor of each sample's sum (default: the sample's trained tokens).
    """
    if sample_denoms is None:
        sample_denoms = [mask.sum() for mask in loss_masks]
    if not isinstance(sample_denoms, torch.Tensor):
        sample_denoms = torch.tensor([float(denom) for denom in sample_denoms])
    if current_sharding().cp_size > 1:
        samples = zip(loss_masks, total_lengths, response_lengths, strict=True)
        loss_masks = [slice_log_prob_with_cp(*sample) for sample in samples]
        response_lengths = [len(mask) for mask in loss_masks]
    return make_reducer(response_lengths, loss_masks, sample_denoms, per_token=calculate_per_token_loss)
