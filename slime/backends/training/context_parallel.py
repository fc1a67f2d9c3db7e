"""Context parallelism: which tokens of a packed micro-batch a rank holds, and how per-token results become whole again.

    segment of 8 tokens, 2 ranks      | 0 1 | 2 3 | 4 5 | 6 7 |      2 * ranks equal chunks
    rank 0 holds chunks 0 and 3       | 0 1 |           | 6 7 |      so that both see about the same number
    rank 1 holds chunks 1 and 2             | 2 3 | 4 5 |            of keys under a causal mask ("zigzag")

Every segment is padded to a multiple of ``2 * ranks`` before (``slime.batch.packing``). Called by ``data``. The maths
of the losses only ever sees whole responses: :func:`gather_responses` is the one way from a rank's part to the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from slime.batch.packing import PackedSequences

__all__ = ["ShardedSequences", "Sharding", "gather_responses", "shard", "zigzag_rows"]


@dataclass(frozen=True)
class Sharding:
    """How a micro-batch is divided among the ranks that share its samples.

    Attributes:
        cp_rank, cp_size, cp_group: context parallelism; the group is None for one rank.
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


@dataclass(frozen=True)
class ShardedSequences:
    """A rank's part of a packed micro-batch.

    Attributes:
        local: tokens, positions, response rows and targets of this rank; ``cu_seqlens`` describe the whole.
        response_index: ``[n]`` int64, which of the micro-batch's ``[N]`` response tokens the rank's rows predict.
        num_response_tokens: N.
    """

    local: PackedSequences
    response_index: torch.Tensor
    num_response_tokens: int


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
    """What this rank reads of ``packed``."""
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
        response_rows=mine[index],
        response_targets=packed.response_targets[index],
    )
    return ShardedSequences(local, index, num_tokens)


def gather_responses(local: torch.Tensor, part: ShardedSequences, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A value per response token: this rank's ``[n]`` -> everybody's ``[N]``, samples in order. Differentiable.

    Every rank computes the same loss from the whole, so the gradient of a rank's part is its slice of the cotangent and
    nothing is summed in backward. All ranks must take part, those without a response token too.
    """
    if group is None:
        return local
    whole: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
        local, part.response_index, part.num_response_tokens, group
    )
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, index: torch.Tensor, total: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        # each token has one owner, so the sum only copies
        whole = local.new_zeros((total, *local.shape[1:])).index_copy_(0, index, local)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None, None
