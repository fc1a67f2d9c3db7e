"""From per-token values to one scalar: the mean per rollout, or the sum over tokens.

A reducer returns a *sum* over the samples of its micro-batch; the division by the number of rollouts (or tokens) of
the whole step happens where all micro-batches and ranks are known. That is what makes the loss independent of how
samples are spread over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

__all__ = ["Reducer", "count_tokens", "make_reducer", "segment_sum"]

Reducer: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Flat ``[N]`` values of the response tokens, in sample order -> scalar."""


def make_reducer(
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    rollout_mask_sums: torch.Tensor,
    *,
    per_token: bool,
) -> Reducer:
    """Build the reducer of one micro-batch.

        rollout mean (default)   sum_i (sum_t m_it x_it) / max(d_i, 1)
        per token                sum_i  sum_t m_it x_it

    ``d_i`` counts the trained tokens of the whole *rollout* sample i belongs to. All samples of a rollout divide by
    the same number, so a rollout weighs the same however many samples (sub-agents, compacted contexts) it was cut
    into. A fully masked sample adds 0 to either sum.

    Args:
        response_lengths: ``R_i`` per sample.
        loss_masks: per sample ``[R_i]``, 1 = trained, on the device of the values.
        rollout_mask_sums: ``[n]`` the ``d_i``.
        per_token: which of the two.

    Raises:
        ValueError: lengths that do not fit together.
    """
    _check_lengths(response_lengths, loss_masks, rollout_mask_sums)
    if not loss_masks:
        return lambda values: values.float().sum()
    mask = torch.cat([m.reshape(-1) for m in loss_masks])
    weights = mask.float()
    if not per_token:
        denominators = rollout_mask_sums.to(device=mask.device, dtype=torch.float32).clamp(min=1.0)
        lengths = torch.tensor(list(response_lengths), device=mask.device)
        weights = weights / denominators.repeat_interleave(lengths, output_size=mask.numel())
    is_trained = mask != 0

    def reduce(values: torch.Tensor) -> torch.Tensor:
        if values.shape != weights.shape:
            raise ValueError(f"expected {weights.numel()} response-token values, got shape {tuple(values.shape)}")
        # where, not a product: an inf at a masked token must not become nan
        return torch.where(is_trained, values.float() * weights, 0.0).sum()

    return reduce


def segment_sum(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sums of consecutive segments: ``[N]`` and n lengths that add up to N -> ``[n]`` fp32. Differentiable."""
    counts = torch.tensor(list(lengths), device=values.device, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts), device=values.device), counts)
    if owner.numel() != values.numel():
        raise ValueError(f"segments hold {owner.numel()} values, got {values.numel()}")
    out = torch.zeros(len(counts), dtype=torch.float32, device=values.device)
    return out.index_add(0, owner, values.float())


def count_tokens(loss_masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Trained tokens of a micro-batch, a scalar int64 tensor: the normaliser of the per-token mode.

    A fully masked sample counts 0 tokens, so removing a sample and masking it out give the same mean.
    """
    if not loss_masks:
        return torch.zeros((), dtype=torch.int64)
    return torch.stack([mask.sum(dtype=torch.int64) for mask in loss_masks]).sum()


def _check_lengths(
    response_lengths: Sequence[int], loss_masks: Sequence[torch.Tensor], rollout_mask_sums: torch.Tensor
) -> None:
    if not len(response_lengths) == len(loss_masks) == rollout_mask_sums.numel():
        raise ValueError(
            f"{len(response_lengths)} response lengths, {len(loss_masks)} loss masks and "
            f"{rollout_mask_sums.numel()} denominators must describe the same samples"
        )
    for i, (length, mask) in enumerate(zip(response_lengths, loss_masks, strict=True)):
        if mask.numel() != length:
            raise ValueError(f"sample {i} of the micro-batch: {mask.numel()} mask entries for {length} response tokens")
