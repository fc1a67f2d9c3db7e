"""GRPO: every token of a response is credited with the response's group-relative reward.

The group normalisation itself happens where groups are still known, in ``slime.batch.rewards``; what arrives here is
already ``(r - mean of the group) / (std of the group + 1e-6)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .types import Credit

__all__ = ["credit"]


def credit(
    rewards: Sequence[float], response_lengths: Sequence[int], *, device: torch.device | str | None = None
) -> Credit:
    """``A_{i,t} = R_i`` for every response token t of sample i.

    Source: DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision). The reference-model
    KL is a term of the loss there, not of the advantage.

    Args:
        rewards: one normalised reward per sample.
        response_lengths: ``R_i``, tokens per response.
        device: where the tensors live.

    Returns:
        fp32 tensors ``[R_i]``; advantages and returns are the same tensors.
    """
    advantages = [
        torch.full((length,), float(reward), dtype=torch.float32, device=device)
        for reward, length in zip(rewards, response_lengths, strict=True)
    ]
    return Credit(advantages=advantages, returns=list(advantages))
