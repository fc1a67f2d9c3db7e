"""The probability ratio and the clipped policy-gradient surrogate, per token. Called by ``policy_loss``."""

from __future__ import annotations

import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.reduce import Samples


def token_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, samples: Samples) -> torch.Tensor:
    """``log pi_old - log pi_new`` per token, ``[N]``, and 0 for tokens that are not trained."""
    # where, not a product: the ratio of a token that only conditions the others (a tool's output) may overflow, and
    # inf * 0 in the backward pass is nan
    return torch.where(samples.mask, old_log_probs - log_probs, 0.0)


def surrogate(
    log_ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`clipped_surrogate` with the bounds of the flags."""
    return clipped_surrogate(log_ratio, advantages, *settings.clip_bounds, settings.eps_clip_c)


def clipped_surrogate(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pessimistic surrogate of PPO as a loss to minimize.

    Sources: PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric upper bound ("clip-higher"), DAPO,
    arXiv:2503.14476, eq. 10; dual clip, Ye et al. 2020, arXiv:1912.09729, eq. 5. Sign: the paper's objective is
    maximized, this is its negative.

    Args:
        ppo_kl: ``log pi_old - log pi_new`` per token, so the ratio is ``r = exp(-ppo_kl)``.
        advantages: same shape.
        eps_clip, eps_clip_high: the ratio is clipped to ``[1 - eps_clip, 1 + eps_clip_high]``.
        eps_clip_c: dual-clip bound, above 1. None switches it off.

    Returns:
        (loss per token, 1.0 if the clipped branch is the larger loss), same shape as the input.

    Raises:
        ValueError: ``eps_clip_c`` is not above 1.
    """
    if eps_clip_c is not None and eps_clip_c <= 1:
        raise ValueError(f"--eps-clip-c {eps_clip_c} must be above 1.")
    ratio = torch.exp(-ppo_kl)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    # the larger loss: a ratio beyond the bounds gives no further gain, but its full loss
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        # with a negative advantage the loss grows with the ratio, and one token could dominate the batch
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    # the metric counts the two bounds of the ratio, not the dual clip
    return loss, (clipped > plain).to(loss.dtype)
