"""Samples that begin with the same tokens: how they are sorted, packed together and counted.

    sample          sorted                shared with the one before    tokens that pass the model
    q a b           p p r                 0                             p p r
    p p s s         p p s s               2                                 s s
    p p r           q a b                 0                             q a b

In lexicographic order samples with a common beginning are neighbors, and of any three in this order the middle one
shares with the first at least as much as the last one does. So a tree of prefixes needs no nodes: one number per sample
describes it, also for every subset. Used by the schedule and by the trainer's batch (``--share-prefixes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy

from slime.batch.balance import Bins, first_fit_pack
from slime.data.columns import TrainData

_WORTH = 8
"""Samples stay together for a common prefix of at least this part of the tokens, 1 / 8. A system prompt of the whole
data set should not decide about micro-batches."""
_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096
"""Rows that are read at a time. Many samples differ soon, others not for a long time."""

_Stream: TypeAlias = numpy.ndarray[Any, Any]


class PrefixTree:
    """The common prefixes of some samples, which are named by their positions.

    Args:
        tokens: of each sample, ids.
        routes: experts that the engine chose, ``[L_i - 1, layers, topk]`` per sample. Tokens with other experts are
            other tokens. The last one has no record and is only equal to a last one.
    """

    def __init__(self, tokens: Sequence[Any], routes: Sequence[Any] | None = None) -> None:
        streams = [numpy.asarray(one, dtype=numpy.int64).reshape(-1, 1) for one in tokens]
        if routes is not None:
            streams = [_with_routes(stream, route) for stream, route in zip(streams, routes, strict=True)]
        order = _sorted(streams)
        self._lengths = list(map(len, streams))
        self._rank = numpy.empty(len(order), dtype=numpy.int64)
        self._rank[order] = numpy.arange(len(order))
        # what samples share with their predecessor among all samples. The tokens are not needed after it
        shared = [0, *(_num_shared(streams[one], streams[other]) for one, other in pairwise(order))]
        self._shared = numpy.array(shared[: len(order)], dtype=numpy.int64)

    def arrange(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """(``positions`` in lexicographic order, tokens that each shares with the one before it)."""
        chosen = numpy.asarray(positions, dtype=numpy.int64)
        chosen = chosen[self._rank[chosen].argsort(kind="stable")]
        if len(chosen) < 2:
            return chosen.tolist(), [0] * len(chosen)
        ranks = self._rank[chosen]
        # samples share the least of what neighbors between them share
        least = numpy.minimum.reduceat(self._shared[ranks[0] + 1 : ranks[-1] + 1], ranks[:-1] - ranks[0])
        return chosen.tolist(), [0, *least.tolist()]

    @property
    def unique_share(self) -> float:
        """Tokens of all samples together, common prefixes once, over those of the samples apart."""
        total = sum(self._lengths)
        return self.cost(range(len(self._lengths))) / total if total else 1.0

    def cost(self, positions: Sequence[int], of_length: Callable[[int], int] = int) -> int:
        """Tokens of a micro-batch with these samples. Common prefixes count once.

        Args:
            of_length: cost of a sequence by its length, for example its FLOPs, instead of its tokens. Only the first
                sample with a prefix pays the cost of a sequence of that length.
        """
        return sum(self._costs(*self.arrange(positions), of_length))

    def units(self, positions: Sequence[int], cap: int) -> Bins:
        """Groups of samples that should stay together, with at most ``cap`` tokens if a group has several samples."""
        units: Bins = []
        size = 0
        for position, shared in zip(*self.arrange(positions), strict=True):
            length = self._lengths[position]
            size += length - shared
            if units and size <= cap and shared * _WORTH >= length:
                units[-1].append(position)
            else:
                units.append([position])
                size = length
        return units

    def pack(self, positions: Sequence[int], cap: int) -> Bins:
        """Micro-batches of at most ``cap`` tokens, first fit. A longer sample is one by itself."""
        units = self.units(positions, cap)
        bins = first_fit_pack([self.cost(unit) for unit in units], cap)
        return [[position for number in items for position in units[number]] for items in bins]

    def split(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Two parts of a micro-batch, as equal as one cut in lexicographic order makes them. Both pay a shared prefix.

        ``positions`` has at least two samples.
        """
        ordered, shared = self.arrange(positions)
        costs = self._costs(ordered, shared, int)
        left, right = 0, sum(costs)
        cuts = []
        for cut in range(1, len(ordered)):
            left, right = left + costs[cut - 1], right - costs[cut - 1]
            cuts.append((max(left, right + shared[cut]), cut))
        _, best = min(cuts)
        return ordered[:best], ordered[best:]

    def expand(self, bins: Bins, target: int) -> None:
        """Split bins in place, the largest first, until there are ``target`` or each has one sample."""
        costs = [self.cost(items) for items in bins]
        while len(bins) < target:
            candidates = [(costs[number], number) for number, items in enumerate(bins) if len(items) > 1]
            if not candidates:
                return
            _, number = max(candidates)
            bins[number], right = self.split(bins[number])
            bins.append(right)
            costs[number] = self.cost(bins[number])
            costs.append(self.cost(right))

    def _costs(self, ordered: Sequence[int], shared: Sequence[int], of_length: Callable[[int], int]) -> list[int]:
        lengths = [self._lengths[position] for position in ordered]
        return [of_length(length) - of_length(prefix) for length, prefix in zip(lengths, shared, strict=True)]


def prefix_tree(columns: TrainData) -> PrefixTree | None:
    """The prefixes of a batch. None with images, whose rows are placed sample by sample."""
    if any(columns.get("multimodal_train_inputs") or ()):
        return None
    return PrefixTree(columns["tokens"], columns.get("rollout_routed_experts"))


def _sorted(streams: Sequence[_Stream]) -> list[int]:
    """Positions in lexicographic order. Reads a stream up to its first difference from all others, once."""
    order: list[int] = []
    pending = [(list(range(len(streams))), 0, _FIRST_BLOCK)]  # equal up to a row, from which a block is compared
    while pending:
        positions, begin, size = pending.pop()
        if len(positions) == 1 or all(len(streams[position]) <= begin for position in positions):
            order += positions
            continue
        blocks: dict[bytes, list[int]] = {}
        for position in positions:
            # any order of the bytes will do, because equal beginnings of tokens are equal beginnings of bytes
            blocks.setdefault(streams[position][begin : begin + size].tobytes(), []).append(position)
        step = (begin + size, min(2 * size, _LARGEST_BLOCK))
        pending += [(blocks[block], *step) for block in sorted(blocks, reverse=True)]
    return order


def _num_shared(one: _Stream, other: _Stream) -> int:
    begin, size, end = 0, _FIRST_BLOCK, min(len(one), len(other))
    while begin < end:
        block = slice(begin, min(begin + size, end))
        differs = (one[block] != other[block]).any(axis=1)
        if differs.any():
            return begin + int(differs.argmax())
        begin, size = begin + size, min(2 * size, _LARGEST_BLOCK)
    return end


def _with_routes(tokens: _Stream, routes: Any) -> _Stream:
    """``[L, 2]``: beside each token a hash of its experts in all layers. The last token has none."""
    rows = numpy.ascontiguousarray(routes)
    # most of the time is per number: four bytes are one
    rows = rows.reshape(len(rows), prod(rows.shape[1:])).view(numpy.uint8)
    words = numpy.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).view(numpy.uint32).astype(numpy.int64)
    # a sum with random odd factors, modulo 2^64
    factors = numpy.random.default_rng(0).integers(1, 2**62, words.shape[1], dtype=numpy.int64) * 2 + 1
    hashes = numpy.zeros((len(tokens), 1), dtype=numpy.int64)
    hashes[: len(rows), 0] = numpy.einsum("ij,j->i", words, factors) + 1  # 0 is that of no experts
    return numpy.concatenate([tokens, hashes], axis=1)
