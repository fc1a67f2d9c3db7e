"""PPO: the clipped surrogate, credit by generalized advantage estimation, and the critic's loss.

``surrogate`` is called per micro-batch of the policy, ``credit`` once per rollout, ``value_loss`` per micro-batch of
the critic. Other estimators use the surrogate, the probability ratio and the discounted sums as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.algorithms import Credit, CreditData, Ragged
from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.reduce import LossOutput, Reducer, Samples


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


# ---- discounted sums backwards in time, and GAE, which is one of them: padded rows ``[B, T]``


def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE token by token: the definition, to check the chunked form.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 11 to 16. With ``v_T = 0``:

        delta_t = r_t + gamma v_{t+1} - v_t       A_t = delta_t + gamma lambd A_{t+1}       return_t = A_t + v_t

    Args:
        rewards, values: ``[B, T]``, right-padded with zeros.

    Returns:
        (advantages ``[B, T]``, returns ``[B, T]``).
    """
    deltas = _deltas(rewards, values, gamma)
    advantages = torch.zeros_like(deltas)
    following = deltas.new_zeros(deltas.shape[0])
    for t in reversed(range(deltas.shape[1])):
        following = deltas[:, t] + gamma * lambd * following
        advantages[:, t] = following
    return advantages, advantages + values


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`vanilla_gae` with ``T / chunk_size`` sequential steps instead of ``T``."""
    advantages = chunked_discounted_returns(_deltas(rewards, values, gamma), gamma * lambd, chunk_size)
    return advantages, advantages + values


def chunked_discounted_returns(rewards: torch.Tensor, discount: float, chunk_size: int = 128) -> torch.Tensor:
    """``G_t = r_t + discount G_{t+1}``, one matrix product per row of chunks and a carry between chunks.

    Time is reversed, so inside a chunk ``y = x M`` with ``M[r, c] = discount^(c - r)`` for ``c >= r``. What came before
    the chunk adds ``discount^(1..C)`` times its last value.

    Args:
        rewards: ``[B, T]``.
        discount: 0 to 1.
        chunk_size: ``C``.

    Returns:
        ``[B, T]`` in the dtype of ``rewards``, equal to the recurrence up to rounding.

    Raises:
        ValueError: ``rewards`` is not 2-D, or the chunk size is below 1.
    """
    if rewards.dim() != 2 or chunk_size < 1:
        raise ValueError(f"expected rewards [B, T] and a positive chunk size, got {tuple(rewards.shape)}, {chunk_size}")
    batch, length = rewards.shape
    if not batch or not length:
        return rewards.clone()
    chunk = min(chunk_size, length)
    # reversed in time: each chunk then depends only on the chunks before it
    x = torch.nn.functional.pad(rewards.flip(1), (0, -length % chunk)).view(batch, -1, chunk)
    steps = torch.arange(chunk, device=rewards.device)
    exponents = steps.unsqueeze(0) - steps.unsqueeze(1)
    # powers in fp64: errors of a rounded discount would grow with the exponent
    base = torch.tensor(discount, dtype=torch.float64, device=rewards.device)
    # clamp: torch.where evaluates both branches, and 0 to a negative power is infinite
    powers = torch.where(exponents >= 0, base ** exponents.clamp(min=0), 0.0).to(rewards.dtype)
    carried = (base ** (steps + 1)).to(rewards.dtype)
    sums = x @ powers
    # the only sequential part: one step per chunk
    carry = sums[:, 0, -1]
    for k in range(1, sums.shape[1]):
        sums[:, k] += carry.unsqueeze(1) * carried
        carry = sums[:, k, -1]
    return sums.reshape(batch, -1)[:, :length].flip(1)


def _deltas(rewards: torch.Tensor, values: torch.Tensor, gamma: float) -> torch.Tensor:
    """Temporal differences ``[B, T]``. The value after the last token is 0."""
    if rewards.shape != values.shape or rewards.dim() != 2:
        raise ValueError(f"rewards and values must both be [B, T], got {tuple(rewards.shape)}, {tuple(values.shape)}")
    # min: a row without tokens has no last value to pad
    following = torch.nn.functional.pad(values[:, 1:], (0, min(1, values.shape[1])))
    return rewards + gamma * following - values
