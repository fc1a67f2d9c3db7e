"""Log-probs of given labels, and samples, from logits whose vocabulary is divided among tensor ranks.

Called by ``scorer`` with the rows of a micro-batch. Every function is a collective over ``group``; rank k holds the ids
``[k V/tp, (k+1) V/tp)``, and columns from ``vocab_size`` on are padding that nothing is drawn from. Rows are handled in
chunks, so that one fp32 copy of ``[chunk, V/tp]`` exists at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Vocabulary", "label_log_probs", "sample"]


@dataclass(frozen=True)
class Vocabulary:
    """How logits become a distribution.

    Attributes:
        size: real token ids.
        temperature: of the rollout: logits are divided by it.
        group: ranks that share the ids; None for one rank.
    """

    size: int
    temperature: float
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class _Rows:
    """Some rows of the logits.

    Attributes:
        part: which rows of all.
        logits: fp32 ``[c, ids of this rank]``, divided by the temperature.
        masses: ``[ranks, c]``: log of the sum of exp over each rank's ids.
    """

    part: slice
    logits: torch.Tensor
    masses: torch.Tensor

    @property
    def normaliser(self) -> torch.Tensor:
        """``[c, 1]``: log of the sum of exp over the vocabulary."""
        return self.masses.logsumexp(0).unsqueeze(1)


def label_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, *, chunk_size: int
) -> torch.Tensor:
    """``log softmax(logits / temperature)`` at several ids of each row: fp32 ``[n, k]``.

    Args:
        logits: ``[n, V/tp]``.
        labels: ``[n, k]`` int64, global ids.
    """
    out = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    first = vocabulary.rank * logits.shape[1]
    for rows in _chunks(logits, vocabulary, chunk_size):
        local = labels[rows.part] - first
        found = _at(rows.logits, local, (local >= 0) & (local < rows.logits.shape[1]))
        out[rows.part] = _largest(found, vocabulary) - rows.normaliser
    return out


def sample(
    logits: torch.Tensor, num: int, vocabulary: Vocabulary, *, chunk_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """``num`` independent draws from each row's distribution: ids int64 ``[n, num]`` and their log-probs fp32.

    Two stages, so that no rank needs the whole row: which rank's ids a draw falls into, by the ranks' masses (rank 0
    draws for all), then which of them (that rank draws).
    """
    ids = torch.full((logits.shape[0], num), -1, dtype=torch.int64, device=logits.device)
    log_probs = torch.full(ids.shape, -math.inf, dtype=torch.float32, device=logits.device)
    first = vocabulary.rank * logits.shape[1]
    for rows in _chunks(logits, vocabulary, chunk_size):
        owners = _draw(rows.masses.T, num, generator)
        if vocabulary.group is not None:
            dist.broadcast(owners, group=vocabulary.group, group_src=0)
        if rows.logits.shape[1]:
            local = _draw(rows.logits, num, generator)
            is_mine = owners == vocabulary.rank
            ids[rows.part] = torch.where(is_mine, local + first, -1)
            log_probs[rows.part] = _at(rows.logits, local, is_mine) - rows.normaliser
    return _largest(ids, vocabulary), _largest(log_probs, vocabulary)


def _chunks(logits: torch.Tensor, vocabulary: Vocabulary, chunk_size: int) -> Iterator[_Rows]:
    width = logits.shape[1]
    num_ids = max(0, min(width, vocabulary.size - vocabulary.rank * width))
    for start in range(0, logits.shape[0], chunk_size):
        part = slice(start, min(start + chunk_size, logits.shape[0]))
        scaled = logits[part, :num_ids].float() / vocabulary.temperature
        yield _Rows(part, scaled, _masses(scaled, vocabulary.group))


def _masses(scaled: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    mine = scaled.logsumexp(1) if scaled.shape[1] else scaled.new_full((scaled.shape[0],), -math.inf)
    if group is None:
        return mine.unsqueeze(0)
    masses = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(masses, mine, group=group)
    return torch.stack(masses)


def _draw(logits: torch.Tensor, num: int, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(logits.softmax(1), num, replacement=True, generator=generator)


def _at(logits: torch.Tensor, local: torch.Tensor, is_mine: torch.Tensor) -> torch.Tensor:
    """Values at this rank's ids, -inf for those of others."""
    if not logits.shape[1]:
        return logits.new_full(local.shape, -math.inf)
    return torch.where(is_mine, logits.gather(1, local.clamp(0, logits.shape[1] - 1)), -math.inf)


def _largest(values: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Of all ranks: each value has one owner, the others hold less than anything."""
    if vocabulary.group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=vocabulary.group)
    return values
