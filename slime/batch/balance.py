"""Number partitioning: bins of bounded size, and sets of equal sum. Pure Python, deterministic, indices only.

Called by the schedule. Does not depend on samples or ranks. Ties are broken by item lists, so that every process that
sees the same numbers gets the same partition.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slime.utils.errors import DataError

Bins: TypeAlias = list[list[int]]


def first_fit_pack(lengths: Sequence[int], cap: int) -> Bins:
    """Put each item, in order, into the first bin that has room, or into a new one. Takes O(n log n)."""
    width = 1 << max(len(lengths) - 1, 0).bit_length()
    # a tree with a leaf per bin: the children of i are 2 i and 2 i + 1, and i has the larger room of both
    room = [cap] * (2 * width)
    bins: Bins = []
    for index, length in enumerate(lengths):
        # samples are never cut: an item above the cap gets a separate bin
        node = width + len(bins) if length > cap else 1
        while node < width:
            node *= 2
            node += room[node] < length
        if node - width == len(bins):
            bins.append([])
        bins[node - width].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def expand_bins_by_splitting(bins: Bins, target: int, lengths: Sequence[int]) -> None:
    """Split bins in place until there are ``target`` of them, or only bins of one item are left.

    The bin with the largest (sum, position) is split into two of similar sum: its left half stays, the right one is
    appended.
    """
    while len(bins) < target:
        candidates = [(sum(lengths[i] for i in items), b) for b, items in enumerate(bins) if len(items) > 1]
        if not candidates:
            return  # fewer bins than ``target``: the caller must check their number
        # the position breaks ties, so that every process splits the same bin
        _, position = max(candidates)
        bins[position], right = split_bin(bins[position], lengths)
        bins.append(right)


def greedy_partition(weights: Sequence[int], k: int, equal_size: bool) -> Bins:
    """``k`` sets of indices: each item, in order, goes to the lightest set, with ``equal_size`` to one with room."""
    sets: Bins = [[] for _ in range(k)]
    sums = [0] * k
    if equal_size and len(weights) % k:
        raise ValueError(f"{len(weights)} items cannot be divided into {k} sets of equal size")
    for index, weight in enumerate(weights):
        room = [i for i in range(k) if not equal_size or len(sets[i]) < len(weights) // k]
        lightest = min(room, key=sums.__getitem__)
        sets[lightest].append(index)
        sums[lightest] += weight
    return sets


def get_reverse_idx(positions: Sequence[int]) -> list[int]:
    """The inverse permutation: ``result[positions[i]] == i``."""
    return sorted(range(len(positions)), key=positions.__getitem__)


def split_bin(items: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two halves of a bin: longest item first, each to the lighter half (the left one on a tie)."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    # the sort is stable: equal lengths keep their order on every process
    for index in sorted(items, key=lambda i: -lengths[i]):
        side = 0 if sums[0] <= sums[1] else 1
        halves[side].append(index)
        sums[side] += lengths[index]
    return halves


def get_seqlen_balanced_partitions(values: Sequence[int], k: int, equal_size: bool) -> Bins:
    """Partition ``range(len(values))`` into k non-empty sets of similar sum. Each set is sorted.

    Raises:
        DataError: fewer values than sets, or ``equal_size`` with a count that k does not divide.
    """
    # an empty set would be a micro-batch without samples
    if len(values) < k:
        raise DataError(f"cannot partition {len(values)} items into {k} non-empty sets")
    partitions = [sorted(items) for items in karmarkar_karp(values, k, equal_size)]
    assert all(partitions), "a set of the partition is empty"
    assert sorted(i for items in partitions for i in items) == list(range(len(values))), "the partition is not a cover"
    return partitions


@dataclass(frozen=True, order=True)
class _Set:
    """A set under construction, compared by sum, then size, then items."""

    total: int
    size: int
    items: tuple[int, ...]

    def merge(self, other: _Set) -> _Set:
        return _Set(self.total + other.total, self.size + other.size, self.items + other.items)


class _State:
    """A partial partition into k sets, largest first. Empty sets, all at the end, are not stored."""

    def __init__(self, sets: Sequence[_Set], k: int) -> None:
        self.sets = sorted(sets, reverse=True)
        self.k = k
        # with fewer than k stored sets the smallest set is empty, and its total is 0
        self.spread = self.sets[0].total - (self.sets[-1].total if len(self.sets) == k else 0)

    def __lt__(self, other: _State) -> bool:
        """Heap order: the largest spread first, then the largest top set."""
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.sets[0] > other.sets[0]

    def merge(self, other: _State) -> _State:
        merged = list(self.sets)
        for position, item in enumerate(other.sets):
            # counted from the end: a large set meets a small one, and the differences cancel
            partner = self.k - 1 - position
            if partner < len(self.sets):
                merged[partner] = merged[partner].merge(item)
            else:  # the partner is an empty set, which is not stored
                merged.append(item)
        return _State(merged, self.k)


def karmarkar_karp(values: Sequence[int], k: int, equal_size: bool) -> Bins:
    """Largest-differencing method (Karmarkar and Karp 1982) for k sets. They are unsorted and may be empty.

    Values must not be negative. With ``equal_size`` every set gets ``len(values) / k`` items.
    """
    ascending = sorted((value, index) for index, value in enumerate(values))
    singles = [_Set(value, 1, (index,)) for value, index in ascending]
    if equal_size:
        if len(values) % k:
            raise DataError(f"cannot partition {len(values)} items into {k} sets of equal size")
        # a state starts with one item in each of its k sets, so every merge keeps the sizes equal
        heap = [_State(singles[start : start + k], k) for start in range(0, len(singles), k)]
    else:
        heap = [_State([single], k) for single in singles]
    heapq.heapify(heap)
    while len(heap) > 1:
        # differencing: the two states of the largest spread are merged, which cancels most of it
        first = heapq.heappop(heap)
        heapq.heappush(heap, first.merge(heapq.heappop(heap)))
    found = [list(item.items) for item in heap[0].sets] if heap else []
    return found + [[] for _ in range(k - len(found))]


def count_micro_batches(total_lengths: Sequence[int], max_tokens_per_gpu: int) -> int:
    """Micro-batches that first-fit packing needs for sequences of these lengths."""
    return len(first_fit_pack(total_lengths, max_tokens_per_gpu))
