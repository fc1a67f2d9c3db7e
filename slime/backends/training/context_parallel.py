"""Context parallelism: divides a packed micro-batch among ranks, and makes per-token results whole again.

    segment of 8 tokens, 2 ranks      | 0 1 | 2 3 | 4 5 | 6 7 |      2 * ranks equal chunks
    rank 0 holds chunks 0 and 3       | 0 1 |           | 6 7 |      so that both see about the same number
    rank 1 holds chunks 1 and 2             | 2 3 | 4 5 |            of keys under a causal mask ("zigzag")

Every segment is padded to a multiple of ``2 * ranks`` before (``slime.batch.packing``). Called by ``data``. Built-in
losses see whole responses: :func:`gather_responses` makes them from the ranks' parts, and every rank computes the same
loss. A ``--custom-loss-function-path`` sees the rank's part of each response and returns the rank's part of the loss.
:func:`gather_parts` is for such losses. :func:`seen_as` decides which of the two a user's function gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from slime.batch.packing import PackedSequences, copy_to


@dataclass(frozen=True)
class Sharding:
    """How a micro-batch is divided among the ranks that share its samples.

    Attributes:
        cp_rank, cp_size, cp_group: context parallelism. The group is None for one rank.
        sequence_multiple: a rank's tokens come in multiples of this (tensor ranks under sequence parallelism).
    """

    cp_rank: int = 0
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None
    sequence_multiple: int = 1

    @property
    def segment_multiple(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def pad_multiple(self) -> int:
        return math.lcm(self.segment_multiple, self.cp_size * self.sequence_multiple)


WHOLE = Sharding()
"""One rank that holds everything."""

# users' functions have no argument for it, but their helpers need it
_SEEN: ContextVar[Sharding | None] = ContextVar("seen", default=None)


@contextmanager
def seen_as(sharding: Sharding) -> Iterator[None]:
    """While a user's function runs: the part of each response that it gets and returns."""
    token = _SEEN.set(sharding)
    try:
        yield
    finally:
        _SEEN.reset(token)


def seen_sharding() -> Sharding | None:
    """The argument of :func:`seen_as`. None outside of users' functions."""
    return _SEEN.get()


@dataclass(frozen=True)
class ShardedSequences:
    """A rank's part of a packed micro-batch.

    Attributes:
        local: tokens, positions, response rows and targets of this rank. ``cu_seqlens`` describe the whole.
        response_index: ``[n]`` int64, which of the micro-batch's ``[N]`` response tokens the rank's rows predict.
        num_response_tokens: N.
    """

    local: PackedSequences
    response_index: torch.Tensor
    num_response_tokens: int

    def to(self, device: torch.device) -> ShardedSequences:
        return replace(self, local=self.local.to(device), response_index=copy_to(self.response_index, device))


def zigzag_rows(cu_seqlens: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rows of the whole ``[T]`` that ``rank`` holds, in its order: int64 ``[T / size]``.

    Args:
        cu_seqlens: ``[S + 1]``, every segment a multiple of ``2 * size``.
    """
    bounds = cu_seqlens.to(torch.int64)
    starts, chunks = bounds[:-1], (bounds[1:] - bounds[:-1]) // (2 * size)
    pieces = torch.stack([starts + rank * chunks, starts + (2 * size - 1 - rank) * chunks], dim=1).flatten()
    lengths = chunks.repeat_interleave(2)
    ends = lengths.cumsum(0)
    within = torch.arange(int(ends[-1]), device=bounds.device) - (ends - lengths).repeat_interleave(lengths)
    return pieces.repeat_interleave(lengths) + within


def shard(packed: PackedSequences, sharding: Sharding) -> ShardedSequences:
    """The part of ``packed`` that this rank holds. Waits for the device of ``packed``."""
    num_tokens = packed.response_rows.numel()
    if sharding.cp_size == 1:
        index = torch.arange(num_tokens, device=packed.tokens.device)
        return ShardedSequences(packed, index, num_tokens)
    rows = zigzag_rows(packed.cu_seqlens, sharding.cp_rank, sharding.cp_size)
    local_row = torch.full((packed.tokens.size(1),), -1, dtype=torch.int64, device=rows.device)
    local_row[rows] = torch.arange(rows.numel(), device=rows.device)
    mine = local_row[packed.response_rows]
    index = (mine >= 0).nonzero().squeeze(1)
    local = replace(
        packed,
        tokens=packed.tokens[:, rows],
        position_ids=packed.position_ids[:, rows],
        is_padding=None if packed.is_padding is None else packed.is_padding[:, rows],
        response_rows=mine[index],
        response_targets=packed.response_targets[index],
    )
    return ShardedSequences(local, index, num_tokens)


def held_spans(total_length: int, response_length: int, sharding: Sharding) -> list[tuple[slice, slice]]:
    """The response tokens of a sample whose logits the rank has, one pair per chunk.

    Returns:
        (rows within the rank's part of the sample, positions in the response of the tokens that they predict). Both
        slices are empty if the chunk predicts no response token.
    """
    rank, size, prompt = sharding.cp_rank, sharding.cp_size, total_length - response_length
    # rounded up: every segment is padded to a multiple of 2 * size
    chunk = total_length if size == 1 else -(-total_length // (2 * size))
    spans = []
    for place, index in enumerate((0,) if size == 1 else (rank, 2 * size - 1 - rank)):
        # row t predicts token t + 1: the response begins at row prompt - 1, and the last row predicts nothing
        first = max(index * chunk, prompt - 1)
        end = max(first, min((index + 1) * chunk, total_length - 1))
        shift = (place - index) * chunk
        spans.append((slice(first + shift, end + shift), slice(first - prompt + 1, end - prompt + 1)))
    return spans


def held_tokens(total_lengths: Sequence[int], response_lengths: Sequence[int], sharding: Sharding) -> torch.Tensor:
    """The response tokens of some samples whose logits the rank has: increasing indices, int64 on the host."""
    held, start = [], 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        spans = held_spans(total, response, sharding)
        held += [torch.arange(start + tokens.start, start + tokens.stop) for _, tokens in spans]
        start += response
    return torch.cat(held)


def gather_parts(
    local: torch.Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int], sharding: Sharding
) -> torch.Tensor:
    """The rank's values ``[n, ...]`` -> ``[N, ...]`` of the whole responses. Differentiable, a collective of the group.

    For losses of which each rank computes its part: the backward pass is a collective as well and sums the cotangents.

    Raises:
        ValueError: the rank does not have ``n`` tokens.
    """
    if sharding.cp_size == 1:
        return local
    index, total = held_tokens(total_lengths, response_lengths, sharding), sum(response_lengths)
    if len(local) != len(index):
        raise ValueError(
            f"context-parallel rank {sharding.cp_rank} of {sharding.cp_size} has {len(index)} of the {total} response "
            f"tokens; got {len(local)} values"
        )
    whole: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        local, index.to(local.device), total, sharding.cp_group, True
    )
    return whole


def gather_responses(local: torch.Tensor, part: ShardedSequences, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A value per response token: this rank's ``[n]`` -> the whole ``[N]``, samples in order. Differentiable.

    For losses that every rank computes from the whole. All ranks must take part, those without a response token too.
    """
    if group is None:
        return local
    whole: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        local, part.response_index, part.num_response_tokens, group, False
    )
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, index: torch.Tensor, total: int, group: dist.ProcessGroup, has_parts: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        # if all ranks compute the same loss, a rank's gradient is its slice. Gradients of parts must be summed.
        ctx.group = group if has_parts else None
        # each token has one owner, so the sum only copies
        whole = local.new_zeros((total, *local.shape[1:])).index_copy_(0, index, local)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (index,) = ctx.saved_tensors
        if ctx.group is not None:
            # all_reduce works in place, and autograd may use grad elsewhere
            grad = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad, group=ctx.group)
        return grad.index_select(0, index), None, None, None, None


def gather_rows(parts: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Tensors ``[t, ...]`` of all context-parallel ranks in one collective, ``[T, ...]`` each, rank after rank."""
    # one collective for all: its latency counts more than the copy
    joined = torch.cat([part.flatten(1) for part in parts], dim=1)
    whole: torch.Tensor = _GatherRows.apply(joined, group)  # type: ignore[no-untyped-call]
    pieces = whole.split([part[0].numel() for part in parts], dim=1)
    return [piece.reshape(-1, *part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]


class _GatherRows(torch.autograd.Function):
    """The ``[t, c]`` of all context-parallel ranks, concatenated to ``[size * t, c]``. Backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        whole = x.new_empty((group.size() * x.size(0), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        part = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        # the queries of every rank contribute to the gradient of these keys
        dist.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None


class _Pick(torch.autograd.Function):
    """``x[rows]``. Its gradient is summed in fp32: CUDA rounds a 16-bit sum after each row, and hundreds of samples may
    share one, so that the sum would stop to grow."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.shape = rows, x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return wide.new_zeros(ctx.shape).index_add_(0, ctx.rows, wide).to(grad.dtype), None


@contextmanager
def picked_rows(tensors: Sequence[torch.Tensor], rows: torch.Tensor, *, again: bool) -> Iterator[list[torch.Tensor]]:
    """``tensor[rows]`` of each.

    Args:
        again: if an operation in the context keeps a part of a result for its backward pass, keep the tensor instead
            and pick the rows again. Not inside torch's checkpoints without reentrance, which would keep it as well.
    """
    picked: list[torch.Tensor] = [_Pick.apply(tensor, rows) for tensor in tensors]  # type: ignore[no-untyped-call]
    sources = {one.untyped_storage().data_ptr(): tensor.detach() for one, tensor in zip(picked, tensors, strict=True)}

    def keep(part: torch.Tensor) -> Any:
        source = sources.get(part.untyped_storage().data_ptr())
        if source is None or not part.numel() or part.numel() % source[0].numel():
            return part
        width = source[0].numel()
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        first, left = divmod(int(part.storage_offset()), width)
        if left or span != part.numel():
            return part  # not whole rows
        return source, rows[first : first + span // width], part.shape, part.stride()

    def restore(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        source, some, shape, stride = kept
        found: torch.Tensor = source.index_select(0, some).as_strided(shape, stride)
        return found

    with torch.autograd.graph.saved_tensors_hooks(keep, restore) if again else nullcontext():
        yield picked
