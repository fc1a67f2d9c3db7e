"""Rotary position embedding (arXiv 2104.09864) of packed rows, from a table that all layers of a micro-batch share.

Megatron computes cosines and sines in every layer, from lengths that it copies to the host: each copy waits for the
device. Here :func:`rotation` makes them once from the positions of this rank's rows, and the table travels through
Megatron's layers as ``rotary_pos_emb``. ``patches.install`` makes Megatron's function for packed rows call
:func:`rotate`.
"""

from __future__ import annotations

from typing import Any

import torch


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
