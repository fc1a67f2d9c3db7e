"""GRPO: every token of a response is credited with the response's group-relative reward.

``slime.batch.rewards`` has normalized the rewards by group: ``(r - mean of the group) / (std of the group + 1e-6)``.
"""

from __future__ import annotations

import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.types import Credit, CreditData, Ragged


def credit(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """``A_{i,t} = R_i`` for every response token t of sample i.

    Source: DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision). The reference-model
    KL is a term of the loss there, not of the advantage.

    Args:
        kl: gives the device.

    Returns:
        fp32 tensors ``[R_i]``. Advantages and returns are the same tensors.
    """
    device = kl[0].device if kl else None
    advantages = [
        torch.full((length,), float(reward), dtype=torch.float32, device=device)
        for reward, length in zip(data.rewards, data.response_lengths, strict=True)
    ]
    # shared memory: later terms of the advantage must not be added in place
    return Credit(advantages=advantages, returns=list(advantages))
