"""Importance weights, rejection and mismatch metrics for ``--custom-tis-function-path``.

    python train.py ... --use-tis --custom-config-path examples/train_infer_mismatch_helper/mis.yaml \
        --custom-tis-function-path examples/train_infer_mismatch_helper/mis.py:compute_mis_weights_with_cp

The formulae are in ``slime.algorithms.mismatch``; ``mis.yaml`` has every setting.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.algorithms.mismatch import compute_mis_weights

__all__ = ["compute_mis_weights", "compute_mis_weights_with_cp"]


def compute_mis_weights_with_cp(
    args: Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """(weighted pg_loss, masks after rejection, metrics named ``mis_...``). Responses are whole under CP as well."""
    weights, masks, metrics = compute_mis_weights(
        args, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs, loss_masks=loss_masks
    )
    # One weight per response token, in the order in which pg_loss holds the responses.
    if weights is not None:
        pg_loss = pg_loss * torch.cat(weights)
    return pg_loss, masks, {f"mis_{name}": torch.cat(rows) for name, rows in metrics.items()}
