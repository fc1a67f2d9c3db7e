"""Advantages with mean 0 and variance 1 over the trained tokens of all ranks. Called by ``credit``."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["masked_whiten"]


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + epsilon)``; mean and unbiased variance over ``mask != 0`` on all ranks of ``group``.

    Two passes in fp64: values that are all equal give 0, whatever they are. All elements are transformed, masked ones
    too. Every rank of the group must call this, one with nothing to add as well.

    Args:
        values: any shape.
        mask: same shape.
        group: ranks that share the statistics; None means this rank alone.
        shift_mean: False adds the mean back.

    Returns:
        fp32, same shape.

    Raises:
        ValueError: no rank has a trained token; raised on all of them.
    """
    is_trained = mask != 0
    x = values.double()
    trained = x[is_trained]
    totals = torch.stack([trained.sum(), is_trained.sum().double()])
    if group is not None:
        dist.all_reduce(totals, group=group)
    count = float(totals[1])
    if count == 0:
        raise ValueError("advantages cannot be normalised: the loss mask of every sample on every rank is zero.")
    mean = totals[0] / count
    squares = (trained - mean).square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    variance = squares / max(count - 1, 1)
    whitened = (x - mean) * torch.rsqrt(variance + epsilon)
    return (whitened if shift_mean else whitened + mean).float()
