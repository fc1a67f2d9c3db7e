"""Means over a whole rollout as the trainer sees it, equal on all ranks. Called by ``actor`` after the steps."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.reduce import make_reducer
from slime.data.columns import TOKEN_VALUES
from slime.utils import accelerator

__all__ = ["rollout_report", "warn_if_off_policy"]

logger = logging.getLogger(__name__)

_SAME = 1e-6
"""Largest difference between log-probs that the same weights and tokens may have where both sides are aligned."""

_PER_SAMPLE = ("rewards", "response_lengths", "total_lengths", "truncated")


def rollout_report(
    columns: dict[str, Any], num_rollouts: int, group: dist.ProcessGroup | None, *, log_correct: bool = False
) -> dict[str, float]:
    """Per-token columns: mean over rollouts of each rollout's mean over trained tokens. Others: mean over samples.

    ``logprob_abs_diff_max`` is the largest ``|trainer - engine|`` over all trained tokens. Every rank must have the
    same columns. With ``log_correct`` also the mean entropy of the samples whose raw reward is 1.
    """
    masks = columns["loss_masks"]
    device = accelerator.current().device()  # where the group communicates; the columns are on the cpu
    reduce = make_reducer(columns["response_lengths"], masks, columns["rollout_mask_sums"], per_token=False)
    names = [name for name in TOKEN_VALUES if columns.get(name) is not None]
    sums = [float(reduce(_flat(columns[name]))) / num_rollouts for name in names]
    plain = [name for name in _PER_SAMPLE if columns.get(name) is not None]
    sums += [float(sum(columns[name])) for name in plain]
    totals = torch.tensor([*sums, len(masks)], dtype=torch.float64, device=device)
    dist.all_reduce(totals, group=group)
    *values, num_samples = totals.tolist()
    report = dict(zip(names, values[: len(names)], strict=True))
    report |= {name: value / num_samples for name, value in zip(plain, values[len(names) :], strict=True)}
    if columns.get("raw_reward"):
        report["raw_reward"] = sum(columns["raw_reward"]) / len(columns["raw_reward"])
    if log_correct and columns.get("entropy") is not None:
        report |= _correct_entropy(columns, group, device)
    if "log_probs" in names and "rollout_log_probs" in names:
        report["logprob_abs_diff_max"] = _largest_difference(columns, group, device)
    return report


def warn_if_off_policy(rollout_id: int, report: dict[str, float]) -> None:
    """Say that trainer and engine differ, for ``--true-on-policy-mode``; their kernels need not be bit-aligned."""
    difference = report.get("logprob_abs_diff_max")
    if difference is None:
        logger.warning("--true-on-policy-mode: rollout %d has no log-probs of the engine to compare with.", rollout_id)
    elif difference > _SAME:
        logger.warning(
            "--true-on-policy-mode: in rollout %d the log-probs of trainer and engine differ by up to %.1e.",
            rollout_id,
            difference,
        )


def _flat(rows: list[torch.Tensor]) -> torch.Tensor:
    """A hook may have put its tensors on the device."""
    return torch.cat([row.cpu() for row in rows])


def _correct_entropy(
    columns: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Mean over the right samples of each one's mean over trained tokens, all ranks together; nothing without one."""
    raw = [columns["raw_reward"][position] for position in columns["partition"]]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for reward, entropy, mask in zip(raw, columns["entropy"], columns["loss_masks"], strict=True):
        if reward == 1 and bool(mask.any()):
            sums += torch.tensor([float(entropy.cpu()[mask.cpu() != 0].mean()), 1.0], dtype=sums.dtype, device=device)
    dist.all_reduce(sums, group=group)
    total, count = sums.tolist()
    return {"correct_entropy": total / count} if count else {}


def _largest_difference(columns: dict[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> float:
    difference = (_flat(columns["log_probs"]) - _flat(columns["rollout_log_probs"])).abs()
    trained = difference[_flat(columns["loss_masks"]) != 0]
    largest = (trained.max() if trained.numel() else torch.zeros(())).to(device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest)
