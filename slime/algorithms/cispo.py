"""CISPO: REINFORCE with clipped importance weights, so that every token keeps its gradient. Called by ``policy_loss``.

Credit is that of GRPO.
"""

from __future__ import annotations

import torch

from slime.algorithms.arguments import AlgorithmArgs


def surrogate(
    log_ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cispo_loss` with the bounds of the flags."""
    return cispo_loss(log_ratio, log_probs, advantages, *settings.clip_bounds)


def cispo_loss(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-stopgrad(clip(r, 1 - eps_clip, 1 + eps_clip_high)) * A * log pi`` per token, not reduced.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The paper has no lower bound: ``--eps-clip`` of 1 or more.

    Args:
        ppo_kl: ``log pi_old - log pi_new`` per token, so the ratio is ``r = exp(-ppo_kl)``.
        log_probs: of the current policy, with graph.
        advantages: same shape.

    Returns:
        (loss per token, 1.0 for a clipped ratio), same shape as the input.
    """
    # a constant: the gradient comes from log_probs alone, so clipping never removes it
    ratio = torch.exp(-ppo_kl.detach())
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)
