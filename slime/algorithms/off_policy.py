"""Corrections for tokens that another policy sampled: weights between trainer and engine, and dropped sequences.

Called by ``policy_loss``. Trainer and engine compute the same weights with different kernels and precision, so samples
are slightly off-policy even if the weights are current.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from slime.algorithms.reduce import Samples


@dataclass(frozen=True)
class Correction:
    """The policy-gradient term after a correction.

    Attributes:
        pg_loss: ``[N]`` per token, with graph.
        loss_masks: masks to reduce with from here on, one ``[R_i]`` per sample. None: unchanged.
        metrics: name -> ``[N]`` per token, without graph.
    """

    pg_loss: torch.Tensor
    loss_masks: list[torch.Tensor] | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


Correct: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Correction]
"""(pg_loss, log-probs of the trainer, log-probs of the engine), each ``[N]``."""


def truncated_weights(
    pg_loss: torch.Tensor, train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, low: float, high: float
) -> Correction:
    """Truncated importance sampling: ``clip(w, low, high) * pg_loss`` with ``w = pi_trainer / pi_engine``.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; truncation
    goes back to Ionides 2008.

    Metrics: tis (w before truncation), tis_clipfrac, tis_abs (``|w - 1|``).
    """
    weight = _ratio(train_log_probs, rollout_log_probs)
    return _weighted(pg_loss, weight, weight.clamp(low, high))


def icepop(
    pg_loss: torch.Tensor, train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, low: float, high: float
) -> Correction:
    """Like :func:`truncated_weights`, but a token whose weight is outside ``[low, high]`` is dropped.

    Source: IcePop, Ring-1T report, arXiv:2510.18855.
    """
    weight = _ratio(train_log_probs, rollout_log_probs)
    is_inside = (weight >= low) & (weight <= high)
    # weight 0 instead of a mask: the token still counts in the denominator
    return _weighted(pg_loss, weight, torch.where(is_inside, weight, 0.0))


def drifted_tokens(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, samples: Samples, delta: float
) -> torch.Tensor:
    """Off-policy sequence masking: 1.0 at tokens to drop, ``[N]``.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1: a sequence whose mean ``log(pi_old / pi_new)`` exceeds
    ``delta`` gives no gradient if its advantage is negative.
    """
    # the mean of the whole sample at each of its tokens: a sequence is dropped as a whole
    drift = samples.spread(samples.means((old_log_probs - log_probs).detach()))
    return ((advantages < 0) & (drift > delta)).to(log_probs.dtype)


def _ratio(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> torch.Tensor:
    # constants: with a graph the weight would add a second gradient to the policy term
    return torch.exp(train_log_probs.detach().float() - rollout_log_probs.detach().float())


def _weighted(pg_loss: torch.Tensor, weight: torch.Tensor, used: torch.Tensor) -> Correction:
    metrics = {"tis": weight, "tis_clipfrac": (used != weight).to(weight.dtype), "tis_abs": (weight - 1).abs()}
    return Correction(pg_loss * used, None, metrics)
