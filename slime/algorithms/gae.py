"""Discounted sums backwards in time, and generalized advantage estimation, which is one of them.

Called by ``reinforce_pp`` and ``ppo`` with padded rows ``[B, T]``.
"""

from __future__ import annotations

import torch


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
