"""The two values an algorithm hands out: credit per response token, and a loss with its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Credit", "LossOutput"]


@dataclass(frozen=True)
class Credit:
    """What every response token is credited with.

    Attributes:
        advantages: one fp32 tensor ``[R_i]`` per sample, positive where the token should become more likely.
        returns: one fp32 tensor ``[R_i]`` per sample, the target of a value function.
    """

    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch.

    Attributes:
        loss: scalar with a graph, in reducer space: the sum over this micro-batch of what the reducer returns, before
            the division by the step's number of rollouts (or tokens).
        metrics: detached scalars in the same space; the same names in the same order on every micro-batch and rank.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
