"""The values that algorithms take and return: data for credit, credit per response token, a loss with its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

Ragged: TypeAlias = Sequence[torch.Tensor]
"""One tensor ``[R_i]`` per sample."""


@dataclass(frozen=True)
class CreditData:
    """The input of an estimator. Each ragged field has one fp32 ``[R_i]`` per sample, or is None.

    Attributes:
        rewards: per sample, after normalization by group if the estimator wants it.
        response_lengths: ``R_i``.
        loss_masks: per sample ``[R_i]``, 1 = trained.
        log_probs: of the policy that is corrected by KL terms: the old policy, or the engine's.
        ref_log_probs: of the reference model.
        values: of the critic.
    """

    rewards: Sequence[float]
    response_lengths: Sequence[int]
    loss_masks: Ragged
    log_probs: Ragged | None = None
    ref_log_probs: Ragged | None = None
    values: Ragged | None = None


@dataclass(frozen=True)
class Credit:
    """The credit of every response token.

    Attributes:
        advantages: one fp32 tensor ``[R_i]`` per sample, positive if the token should become more likely.
        returns: one fp32 tensor ``[R_i]`` per sample, the target of a value function.
    """

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]


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
