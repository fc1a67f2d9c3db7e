"""Partitioning numbers into bins: first fit under a cap, and Karmarkar-Karp for equal sums."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["balanced_partitions", "expand_bins_by_splitting", "first_fit"]


def first_fit(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Each item goes into the first bin with room; an item above ``cap`` has a bin of its own."""
    bins: list[list[int]] = []
    sums: list[int] = []
    for index, length in enumerate(lengths):
        for position, total in enumerate(sums):
            if total + length <= cap:
                bins[position].append(index)
                sums[position] += length
                break
        else:
            bins.append([index])
            sums.append(length)
    return bins


def expand_bins_by_splitting(bins: list[list[int]], target: int, lengths: Sequence[int]) -> None:
    """Split the fullest bin in two, longest items first, until there are ``target`` bins or only single items."""
    while len(bins) < target:
        splittable = [(sum(lengths[i] for i in items), position) for position, items in enumerate(bins) if len(items) > 1]
        if not splittable:
            return
        position = max(splittable)[1]
        left: list[int] = []
        right: list[int] = []
        for item in sorted(bins[position], key=lambda i: -lengths[i]):
            lighter = left if sum(lengths[i] for i in left) <= sum(lengths[i] for i in right) else right
            lighter.append(item)
        bins[position] = left
        bins.append(right)


def balanced_partitions(values: Sequence[float], k: int, *, equal_size: bool) -> list[list[int]]:
    """k sets of indices with sums as equal as the largest differencing method makes them (Karmarkar and Karp 1982).

    Args:
        equal_size: every set holds the same number of items; ``len(values)`` must be a multiple of ``k``.
    """
    order = sorted((value, index) for index, value in enumerate(values))
    if equal_size:
        if len(order) % k:
            raise ValueError(f"{len(order)} items cannot be divided into {k} sets of equal size")
        starts = [[[order[i + j]] for j in range(k)] for i in range(0, len(order), k)]
    else:
        starts = [[[item], *([] for _ in range(k - 1))] for item in order]
    heap = [_State(sets) for sets in starts]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        merged = [a.items + b.items for a, b in zip(first.sets, reversed(second.sets), strict=True)]
        heapq.heappush(heap, _State(merged))
    return [sorted(index for _, index in part.items) for part in heap[0].sets]


class _Set:
    def __init__(self, items: list[tuple[float, int]]) -> None:
        self.items = items
        self.sum = sum(value for value, _ in items)

    @property
    def key(self) -> tuple[float, int, list[tuple[float, int]]]:
        return self.sum, len(self.items), self.items


class _State:
    """k sets in descending order; the state with the larger spread comes first, then the one with the larger top."""

    def __init__(self, sets: list[list[tuple[float, int]]]) -> None:
        self.sets = sorted((_Set(items) for items in sets), key=lambda part: part.key, reverse=True)
        self.spread = self.sets[0].sum - self.sets[-1].sum

    def __lt__(self, other: _State) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.sets[0].key > other.sets[0].key
