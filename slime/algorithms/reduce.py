"""Reduces per-token values to one scalar: the mean per rollout, or the sum over tokens.

A reducer returns a *sum* over the samples of its micro-batch. The step divides by the number of rollouts (or
tokens) of all micro-batches and ranks. So the loss does not depend on how samples are divided among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

Reducer: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Flat ``[N]`` values of the response tokens, in sample order -> scalar."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch.

    Attributes:
        loss: scalar with a graph, in reducer space: the sum that the reducer returns for this micro-batch, before
            the division by the step's number of rollouts (or tokens).
        metrics: detached scalars in the same space. The same names in the same order on every micro-batch and rank.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """The samples of a micro-batch, which share one flat ``[N]`` of response tokens. Responses are whole on every rank.

    Attributes:
        response_lengths: ``R_i``. 0 is allowed.
        loss_masks: per sample ``[R_i]``, 1 = trained, on the device of the values.
        rollout_mask_sums: ``[n]`` trained tokens of the whole rollout that each sample belongs to.
        per_token: reduce to the sum over tokens instead of the sum of means per rollout.
    """

    response_lengths: Sequence[int]
    loss_masks: Sequence[torch.Tensor]
    rollout_mask_sums: torch.Tensor
    per_token: bool = False

    def reducer(self, loss_masks: Sequence[torch.Tensor] | None = None) -> Reducer:
        """The reducer of these samples. With other masks the denominators stay those of the original ones."""
        masks = self.loss_masks if loss_masks is None else loss_masks
        return make_reducer(self.response_lengths, masks, self.rollout_mask_sums, per_token=self.per_token)

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """``[N]`` bool, whether a token is trained."""
        if not self.loss_masks:
            return self.rollout_mask_sums.new_zeros(0, dtype=torch.bool)
        return torch.cat([mask.reshape(-1) for mask in self.loss_masks]) != 0

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """``[N]`` -> one ``[R_i]`` per sample."""
        return list(torch.split(flat, list(self.response_lengths)))

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """``[N]`` -> ``[n]`` mean over the trained tokens of each sample, 0 without any. Differentiable."""
        # clamp: a sample without trained tokens has mean 0
        counts = segment_sum(self.mask, self.response_lengths).clamp(min=1.0)
        # where, not a product: an inf at a masked token must not become nan
        return segment_sum(torch.where(self.mask, values.float(), 0.0), self.response_lengths) / counts

    def spread(self, per_sample: torch.Tensor) -> torch.Tensor:
        """``[n]`` -> ``[N]``, each value at all tokens of its sample. Differentiable."""
        return repeated(per_sample, self.response_lengths)


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

    ``d_i`` counts the trained tokens of the whole *rollout* of sample i. All samples of a rollout divide by the same
    number, so its weight does not depend on the number of its samples (sub-agents, compacted contexts).

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
        # zero, but with the graph of the values: a backward pass may contain collectives
        return lambda values: values.float().sum()
    mask = torch.cat([m.reshape(-1) for m in loss_masks])
    weights = mask.float()
    if not per_token:
        # clamp: a fully masked rollout adds 0 and not 0 / 0
        denominators = rollout_mask_sums.to(device=mask.device, dtype=torch.float32).clamp(min=1.0)
        weights = weights / repeated(denominators, response_lengths)
    is_trained = mask != 0

    def reduce(values: torch.Tensor) -> torch.Tensor:
        if values.shape != weights.shape:
            raise ValueError(f"expected {weights.numel()} response-token values, got shape {tuple(values.shape)}")
        # where, not a product: an inf at a masked token must not become nan
        return torch.where(is_trained, values.float() * weights, 0.0).sum()

    return reduce


def segment_sum(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sums of consecutive segments: ``[N]`` and n lengths that add up to N -> ``[n]`` fp32. Differentiable."""
    if sum(lengths) != values.numel():
        raise ValueError(f"segments hold {sum(lengths)} values, got {values.numel()}")
    owner = repeated(torch.arange(len(lengths), device=values.device), lengths)
    out = torch.zeros(len(lengths), dtype=torch.float32, device=values.device)
    return out.index_add(0, owner, values.float())


def repeated(per_segment: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """``[n]`` and n lengths that add up to N -> ``[N]``, each value at all places of its segment. Differentiable."""
    # The host waits neither for a copy from pinned memory, nor with output_size for the sum of the lengths.
    counts = torch.tensor(list(lengths), dtype=torch.int64, pin_memory=per_segment.is_cuda)
    counts = counts.to(device=per_segment.device, non_blocking=True)
    return per_segment.repeat_interleave(counts, output_size=sum(lengths))


def count_tokens(loss_masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Trained tokens of a micro-batch, a scalar int64 tensor: the normalizer of the per-token mode.

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
