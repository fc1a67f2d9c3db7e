"""Tables about the sequences of a packed micro-batch, for layers that carry a state from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from slime.backends.training.context_parallel import zigzag_rows
from slime.batch.packing import copy_to

CHUNK = 64
"""Tokens of a matrix product."""


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
