"""PPO with a critic: credit by generalized advantage estimation, and the critic's loss.

``credit`` is called once per rollout, ``value_loss`` per micro-batch of the critic. The policy's surrogate is in
``clip``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.gae import chunked_gae
from slime.algorithms.reduce import Reducer
from slime.algorithms.types import Credit, CreditData, LossOutput, Ragged


@torch.no_grad()
def credit(data: CreditData, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    """GAE over token rewards ``-kl_coef kl_t``, plus the sample's reward at its final response token.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2 (KL as a reward); Schulman et al. 2015, arXiv:1506.02438.
    Every response token takes part, also those of tools and environments. With ``--gae-trained-tokens-only`` untrained
    tokens are not steps of the process: the next state is that of the next trained token, and the last trained token
    gets the reward.

    Returns:
        fp32 tensors ``[R_i]``: advantages, and returns (advantage + value), the critic's target. The advantage of a
        token that takes no part is 0.

    Raises:
        ValueError: no values.
    """
    if data.values is None:
        raise ValueError(
            f"--advantage-estimator {settings.advantage_estimator}: the batch has no values; the critic has not been "
            "run."
        )
    if not settings.gae_trained_tokens_only:
        return _credit(data.rewards, data.values, kl, settings)
    parts = [mask.to(estimate.device) != 0 for mask, estimate in zip(data.loss_masks, kl, strict=True)]
    inside = _credit(data.rewards, _selected(data.values, parts), _selected(kl, parts), settings)
    # an untrained token keeps its value as its return, so that the critic's error there is 0
    wholes = [value.float() for value in data.values]
    return Credit(
        advantages=_put(inside.advantages, parts, [torch.zeros_like(value) for value in wholes]),
        returns=_put(inside.returns, parts, wholes),
    )


def _credit(rewards: Sequence[float], values: Ragged, kl: Ragged, settings: AlgorithmArgs) -> Credit:
    rows = []
    for reward, estimate in zip(rewards, kl, strict=True):
        row = -settings.kl_coef * estimate.float()
        if row.numel():
            # row is a new tensor: kl itself must not change, it is reported
            row[-1] += reward
        rows.append(row)
    if not rows:
        return Credit(advantages=[], returns=[])
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad(rows, batch_first=True), pad([value.float() for value in values], batch_first=True)
    advantages, returns = chunked_gae(*padded, settings.gamma, settings.lambd)
    lengths = [len(row) for row in rows]
    # clone: a view would keep the padded batch in memory
    return Credit(
        advantages=[row[:n].clone() for row, n in zip(advantages, lengths, strict=True)],
        returns=[row[:n].clone() for row, n in zip(returns, lengths, strict=True)],
    )


def _selected(rows: Ragged, parts: Ragged) -> list[torch.Tensor]:
    return [row[part] for row, part in zip(rows, parts, strict=True)]


def _put(rows: Ragged, parts: Ragged, wholes: Ragged) -> list[torch.Tensor]:
    """Copies of ``wholes`` with ``rows`` at the positions where ``parts`` is true."""
    return [
        whole.masked_scatter(part.to(whole.device), row.to(whole.device))
        for row, part, whole in zip(rows, parts, wholes, strict=True)
    ]


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float, reduce: Reducer
) -> LossOutput:
    """Squared error of the critic, pessimistic about changes of more than ``value_clip`` from its old estimate.

    Source: the PPO2 implementation of OpenAI Baselines, without its factor 1/2:

        loss_t = max((v_t - G_t)^2, (v0_t + clip(v_t - v0_t, -value_clip, value_clip) - G_t)^2)

    Args:
        values: ``[N]`` with graph.
        old_values: ``[N]``, the estimates that the advantages came from.
        returns: ``[N]``.

    Metrics: value_loss, value_clipfrac (share of tokens that moved further than ``value_clip``).
    """
    moved = values - old_values
    bounded = old_values + moved.clamp(-value_clip, value_clip)
    loss = reduce(torch.maximum((bounded - returns).square(), (values - returns).square()))
    clipped = reduce((moved.abs() > value_clip).to(values.dtype))
    return LossOutput(loss=loss, metrics={"value_loss": loss.detach(), "value_clipfrac": clipped.detach()})
