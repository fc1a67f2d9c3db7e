"""Tables of the packed rows of a micro-batch, made once and shared by all layers: rotations and sequences.

Rotary position embedding is that of arXiv 2104.09864. Megatron computes cosines and sines in every layer, from lengths
that it copies to the host: each copy waits for the device. Here :func:`rotation` makes them once from the positions of
this rank's rows, and the table travels through Megatron's layers as ``rotary_pos_emb``. ``patches.install`` makes
Megatron's function for packed rows call :func:`rotate`. :class:`Sequences` is for layers that carry a state from token
to token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from slime.backends.training.context_parallel import zigzag_rows
from slime.batch.packing import copy_to

CHUNK = 64
"""Tokens of a matrix product."""


def rotation(rotary: Any, positions: torch.Tensor, max_seqlen: int, dtype: torch.dtype) -> torch.Tensor:
    """The table ``[2, t, d]`` for d rotated columns: cosines, and sines with the signs that :func:`rotate` needs.

    Args:
        rotary: Megatron's module, of any scaling.
        positions: int64 ``[t]`` of this rank's rows within their sequences.
        max_seqlen: above all positions.
    """
    # not ``forward``, which keeps the angles of the last 32 lengths
    found = rotary.get_emb(max_seqlen)
    angles, amplitude = found if isinstance(found, tuple) else (found, 1.0)  # YaRN has an amplitude
    rows = angles.flatten(1).index_select(0, positions)
    return table_of(rows, dtype, is_interleaved=rotary.rotary_interleaved, amplitude=amplitude)


def table_of(
    angles: torch.Tensor, dtype: torch.dtype, *, is_interleaved: bool = False, amplitude: float = 1.0
) -> torch.Tensor:
    """fp32 angles ``[t, d]``, each twice: in both halves, or in neighboring columns -> ``[2, t, d]``."""
    cosines, sines = ((part * amplitude).to(dtype) for part in (angles.cos(), angles.sin()))
    if is_interleaved:
        sines[:, 0::2].neg_()
    else:
        sines[:, : sines.size(1) // 2].neg_()
    return torch.stack([cosines, sines])


def rotate(
    x: torch.Tensor, table: torch.Tensor, *, is_interleaved: bool = False, is_latent: bool = False
) -> torch.Tensor:
    """``x`` ``[t, heads, c]`` with its first d columns rotated, d <= c.

    Args:
        table: ``[2, t, d]`` of :func:`table_of`.
        is_interleaved: neighboring columns form a pair. Otherwise one column of either half.
        is_latent: latent attention: neighbors form a pair and move into the halves.
    """
    width = table.size(-1)
    turned, kept = x[..., :width], x[..., width:]
    if is_latent:
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
    pairs = turned.unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    partners = pairs.flip(-1 if is_interleaved else -2).flatten(-2)
    cosines, sines = table.to(x.dtype).unsqueeze(2)
    turned = turned * cosines + partners * sines
    return torch.cat([turned, kept], dim=-1) if kept.size(-1) else turned


class Sequences:
    """Made on the host, once per micro-batch, and copied without a wait for the device.

    Attributes:
        count: S sequences.
        cu_seqlens: int64 ``[S + 1]`` where each sequence starts, and t. Kernels keep tables for this object.
        number: int64 ``[t]`` of each token's sequence.
        chunk_size: sequences are cut into chunks of so many tokens. The chunks are sorted by their number within the
            sequence, those with the same number by the length of the sequence, longest first.
        chunks: how many there are of each number.
        slots: int64 ``[t]`` place of each token in the row of chunks, each with ``chunk_size`` places.
        by_rank: int64 ``[t]`` the token at each place if the tokens of context-parallel ranks follow one another.
        by_token: the inverse.
    """

    def __init__(
        self, borders: Sequence[int], device: torch.device, *, cp_size: int = 1, chunk_size: int = CHUNK
    ) -> None:
        """``borders``: ``cu_seqlens`` on the host."""
        starts = torch.tensor(borders)
        lengths = starts.diff()
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        self.count, self.chunk_size = len(lengths), chunk_size
        self.cu_seqlens, self.number = copy_to(starts, device), copy_to(number, device)
        slots, self.chunks = _chunk_layout(starts, number, chunk_size)
        self.slots = copy_to(slots, device)
        if cp_size > 1:
            by_rank = torch.cat([zigzag_rows(starts, rank, cp_size) for rank in range(cp_size)])
            self.by_rank, self.by_token = copy_to(by_rank, device), copy_to(by_rank.argsort(), device)

    @property
    def first_chunks(self) -> list[int]:
        """Index of the first chunk of each number."""
        return list(accumulate(self.chunks[:-1], initial=0)) if self.chunks else []


def _chunk_layout(starts: torch.Tensor, number: torch.Tensor, size: int) -> tuple[torch.Tensor, list[int]]:
    chunks = (starts.diff() + size - 1) // size
    order = chunks.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel())
    counts = (chunks[:, None] > torch.arange(int(chunks.max()) if chunks.numel() else 0)).sum(0)
    first = counts.cumsum(0) - counts
    position = torch.arange(number.numel()) - starts[:-1][number]
    slots = (first[position // size] + rank[number]) * size + position % size
    return slots, counts.tolist()
