"""Supervised fine-tuning: the negative log-likelihood of the trained tokens. Called by the trainer's loss dispatch."""

from __future__ import annotations

import torch

from slime.algorithms.reduce import Reducer
from slime.algorithms.types import LossOutput


def sft_loss(log_probs: torch.Tensor, reduce: Reducer) -> LossOutput:
    """``loss = -reduce(log pi(token))``.

    Args:
        log_probs: ``[N]`` fp32, response tokens of the micro-batch in sample order.
        reduce: from :func:`slime.algorithms.reduce.make_reducer`.
    """
    loss = -reduce(log_probs)
    return LossOutput(loss=loss, metrics={"loss": loss.detach()})
