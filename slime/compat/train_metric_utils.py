"""How values of micro-batches and ranks become one metric, for trainers other than slime's own.

Public helpers with the arithmetic that users' training code relies on; the Megatron backend reduces in ``step`` and
``rollout_report``. Pure but for the collective that is handed in.
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
        losses_reduced: per micro-batch ``{"keys": names, "values": [num_tokens, value, ...]}``, values summed over the
            rollouts or tokens of the micro-batch.
        calculate_per_token_loss: mean over tokens, else over the step's ``step_global_batch_size`` rollouts.
        cp_size: context-parallel ranks that each count all tokens of their shared samples.
        dp_with_cp_group: all ranks of data and context parallelism; None for a single process.
    """
    names = list(losses_reduced[0]["keys"])
    total = torch.stack([torch.as_tensor(loss["values"], dtype=torch.float32) for loss in losses_reduced]).sum(0)
    if dp_with_cp_group is not None:
        total = total.to(accelerator.current().device())  # where the group communicates
        dist.all_reduce(total, group=dp_with_cp_group)
    tokens, *values = total.tolist()
    if calculate_per_token_loss:
        return {name: value * cp_size / max(tokens, 1.0) for name, value in zip(names, values, strict=True)}
    return {name: value / step_global_batch_size for name, value in zip(names, values, strict=True)}


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """(sum, count) that one rank adds to a mean over all rollouts.

    Args:
        per_rank_reducer_sum: of per-rollout means over this rank's rollouts and its part of their tokens.
    """
    return cp_size * per_rank_reducer_sum, num_rollouts_in_rollout / dp_size


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: dist.ProcessGroup | None
) -> dict[str, float] | None:
    """The metrics of all ranks together, under the names that the source rank has; None on the others.

    ``(sum, count)`` becomes the sum of sums over the sum of counts, 0 for a count of 0; a number becomes the mean over
    ranks.
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
