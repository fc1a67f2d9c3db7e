"""Reduction of values of micro-batches and ranks to one metric, for trainers outside of slime.

Public helpers for users' training code. The Megatron backend reduces in ``step`` and ``rollout_report``. Apart from the
collective of the given group, the functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.utils import accelerator

__all__ = ["gather_and_reduce_log_dict", "reduce_train_step_metrics", "rollout_log_metric_contribution"]


def reduce_train_step_metrics(
    losses_reduced: Sequence[Mapping[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """The metrics of one optimizer step.

    Args:
        losses_reduced: per micro-batch ``{"keys": names, "values": [num_tokens, value, ...]}``. Values are sums over
            the rollouts or tokens of the micro-batch.
        calculate_per_token_loss: mean over tokens, else over the step's ``step_global_batch_size`` rollouts.
        cp_size: number of context-parallel ranks.
        dp_with_cp_group: all ranks of data and context parallelism. None for a single process.
    """
    # Values have no names in the reduction: all micro-batches and ranks must use the same keys in the same order.
    names = list(losses_reduced[0]["keys"])
    total = torch.stack([torch.as_tensor(loss["values"], dtype=torch.float32) for loss in losses_reduced]).sum(0)
    if dp_with_cp_group is not None:
        total = total.to(accelerator.current().device())  # NCCL cannot reduce tensors on the CPU
        dist.all_reduce(total, group=dp_with_cp_group)
    tokens, *values = total.tolist()
    if calculate_per_token_loss:
        # Every context-parallel rank counts all tokens of a shared sample, so the sum has each token cp_size times.
        return {name: value * cp_size / max(tokens, 1.0) for name, value in zip(names, values, strict=True)}
    return {name: value / step_global_batch_size for name, value in zip(names, values, strict=True)}


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """(sum, count) that one rank adds to a mean over all rollouts.

    Args:
        per_rank_reducer_sum: sum over this rank's rollouts of per-rollout means, with its part of their tokens.
    """
    return cp_size * per_rank_reducer_sum, num_rollouts_in_rollout / dp_size


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: dist.ProcessGroup | None
) -> dict[str, float] | None:
    """The metrics of all ranks, under the names of the source rank. None on the other ranks.

    ``(sum, count)`` becomes the sum of sums over the sum of counts, or 0 for a count of 0. A number becomes the mean
    over ranks.
    """
    gathered: list[Any] | None = [dict(log_dict)]
    if dp_group is not None:
        is_source = dist.get_rank() == dp_src_rank
        gathered = [None] * dp_size if is_source else None
        dist.gather_object(dict(log_dict), gathered, dst=dp_src_rank, group=dp_group)
    if gathered is None:
        return None
    return {name: _reduce([rank[name] for rank in gathered]) for name in log_dict}


def _reduce(values: Sequence[Any]) -> float:
    if not isinstance(values[0], tuple):
        return float(sum(values) / len(values))
    total, count = (float(sum(part)) for part in zip(*values, strict=True))
    return total / count if count else 0.0
