"""Means over a whole rollout as the trainer sees it, equal on all ranks. Called by ``actor`` after the steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.reduce import make_reducer

__all__ = ["rollout_report"]

_PER_TOKEN = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns")
_PER_SAMPLE = ("rewards", "response_lengths", "total_lengths", "truncated")


def rollout_report(columns: dict[str, Any], num_rollouts: int, group: dist.ProcessGroup) -> dict[str, float]:
    """Per-token columns: mean over rollouts of each rollout's mean over trained tokens. Others: mean over samples.

    ``logprob_abs_diff_max`` is the largest ``|trainer - engine|`` over all trained tokens. Every rank must have the
    same columns.
    """
    masks = columns["loss_masks"]
    reduce = make_reducer(columns["response_lengths"], masks, columns["rollout_mask_sums"], per_token=False)
    names = [name for name in _PER_TOKEN if columns.get(name) is not None]
    sums = [float(reduce(torch.cat(columns[name]))) / num_rollouts for name in names]
    plain = [name for name in _PER_SAMPLE if columns.get(name) is not None]
    sums += [float(sum(columns[name])) for name in plain]
    totals = torch.tensor([*sums, len(masks)], dtype=torch.float64)
    dist.all_reduce(totals, group=group)
    *values, num_samples = totals.tolist()
    report = dict(zip(names, values[: len(names)], strict=True))
    report |= {name: value / num_samples for name, value in zip(plain, values[len(names) :], strict=True)}
    if columns.get("raw_reward"):
        report["raw_reward"] = sum(columns["raw_reward"]) / len(columns["raw_reward"])
    if "log_probs" in names and "rollout_log_probs" in names:
        report["logprob_abs_diff_max"] = _largest_difference(columns, group)
    return report


def _largest_difference(columns: dict[str, Any], group: dist.ProcessGroup) -> float:
    difference = (torch.cat(columns["log_probs"]) - torch.cat(columns["rollout_log_probs"])).abs()
    trained = difference[torch.cat(columns["loss_masks"]) != 0]
    largest = trained.max() if trained.numel() else torch.zeros(())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest)
