"""What the ranks do in the tests of context-parallel attention."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.attention import PackedAttention, packed_segments
from slime.backends.training.context_parallel import ShardedSequences, gather_responses, zigzag_rows

__all__ = ["attend", "gather"]


def attend(
    rank: int, world_size: int, inputs: list[torch.Tensor], cotangent: torch.Tensor, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """This rank's rows, its output, and the gradients of its part of ``inputs`` (query, key, value ``[T, h, d]``)."""
    dist.init_process_group("gloo")
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = zigzag_rows(bounds, rank, world_size)
    config = SimpleNamespace(window_size=None, kv_channels=inputs[0].size(-1), attention_dropout=0.0)
    attention = PackedAttention(config, layer_number=1)
    local = [tensor[rows].requires_grad_() for tensor in inputs]
    segments = packed_segments(bounds, max(lengths), cp_rank=rank, cp_size=world_size, cp_group=dist.group.WORLD)
    out = attention(*local, packed_seq_params=segments)
    (out * cotangent[rows]).sum().backward()
    return rows, out.detach(), [tensor.grad for tensor in local]


def gather(rank: int, world_size: int, owner: list[int], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole made from parts, ``owner[i]`` holding token i, and the gradient of this rank's part of a loss that all
    ranks compute from the whole."""
    dist.init_process_group("gloo")
    index = torch.tensor([i for i, one in enumerate(owner) if one == rank], dtype=torch.int64)
    local = values[index].requires_grad_()
    part = ShardedSequences(None, index, len(owner))  # type: ignore[arg-type]  # only the index is read
    whole = gather_responses(local, part, dist.group.WORLD)
    (whole.sum() ** 2).backward()
    return whole.detach(), local.grad
