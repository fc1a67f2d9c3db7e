"""REINFORCE++ and its variant with a group baseline. Called by ``credit``, which also whitens the result."""

from __future__ import annotations

import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.ppo import chunked_discounted_returns
from slime.algorithms.types import Credit, CreditData, Ragged


def credit(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """Discounted return of each token. The KL penalty is a reward per token.

    Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262, discounted with the KL penalty of InstructGPT:

        r_t = -kl_coef kl_t m_t + [t is the last trained token] R        A_t = G_t = r_t + gamma G_{t+1}

    ``R`` is not normalized by group. A fully masked sample gets zeros.

    Returns:
        fp32 tensors ``[R_i]``. Advantages and returns are the same tensors.
    """
    rows = []
    for reward, estimate, mask in zip(data.rewards, kl, data.loss_masks, strict=True):
        is_trained = mask.to(estimate.device) != 0
        row = torch.where(is_trained, -settings.kl_coef * estimate.float(), 0.0)
        trained = is_trained.nonzero()
        if trained.numel():
            # the last trained token, not the last token: a response may end with the output of a tool
            row[trained[-1]] += reward
        rows.append(row)
    returns = _discounted(rows, settings.gamma)
    # shared memory: later terms of the advantage must not be added in place
    return Credit(advantages=returns, returns=list(returns))


def baseline_credit(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """``A_t = R - kl_coef kl_t``. ``R`` is already relative to the mean of its group.

    Source: REINFORCE++-baseline, arXiv:2501.03262; without division by the group's deviation.

    Returns:
        fp32 tensors ``[R_i]``. Advantages and returns are the same tensors.
    """
    advantages = [
        float(reward) - settings.kl_coef * estimate.float() for reward, estimate in zip(data.rewards, kl, strict=True)
    ]
    return Credit(advantages=advantages, returns=list(advantages))


def _discounted(rows: Ragged, gamma: float) -> list[torch.Tensor]:
    if not rows:
        return []
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    returns = chunked_discounted_returns(padded, gamma)
    # clone: a view would keep the padded batch in memory
    return [row[: len(original)].clone() for row, original in zip(returns, rows, strict=True)]
