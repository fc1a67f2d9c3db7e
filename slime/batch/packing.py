"""Sequences behind one another in one row, and where the logits of their response tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["PackedSequences", "pack"]


@dataclass(frozen=True)
class PackedSequences:
    """A micro-batch as the model reads it.

    Attributes:
        tokens: int64 [1, T].
        position_ids: int64 [1, T], starting at 0 in every sequence.
        cu_seqlens: int32 [S + 1], start of each sequence and the end of the last; padding is one more sequence.
        max_seqlen: longest sequence.
        response_rows: int64 [N], row of the logits that predicts each response token, samples in order.
        response_targets: int64 [N], those tokens.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    response_rows: torch.Tensor
    response_targets: torch.Tensor


def pack(
    tokens: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    *,
    pad_multiple: int = 1,
    device: torch.device | None = None,
) -> PackedSequences:
    """Pack samples; the row before a token predicts it, so response token t of a sample sits at row P + t - 1."""
    lengths = [len(sequence) for sequence in tokens]
    padding = -sum(lengths) % pad_multiple
    parts = list(tokens)
    if padding:
        parts.append(torch.zeros(padding, dtype=torch.int64))
        lengths.append(padding)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = [
        torch.arange(start + length - response - 1, start + length - 1)
        for start, length, response in zip(starts.tolist(), lengths, response_lengths, strict=False)
    ]
    flat = torch.cat(parts)
    response_rows = torch.cat(rows)
    return PackedSequences(
        tokens=flat[None].to(device),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        cu_seqlens=starts.to(torch.int32).to(device),
        max_seqlen=max(lengths),
        response_rows=response_rows.to(device),
        response_targets=flat[response_rows + 1].to(device),
    )
