"""Columns of a whole rollout -> one dictionary of tensors per data-parallel rank."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from slime.batch.arguments import BatchArgs
from slime.batch.schedule import plan_steps
from slime.config.groups import from_args
from slime.data.columns import COLUMNS, TrainData
from slime.data.layout import ParallelLayout

__all__ = ["split_by_dp"]


def split_by_dp(data: TrainData, layout: ParallelLayout, args: Namespace) -> tuple[list[dict[str, Any]], int]:
    """Per rank its part of every column and its schedule; and how many samples fill no step.

    A column that is not in ``COLUMNS`` but has one entry per sample belongs to a user's hook and is split as well.
    """
    plan = plan_steps(
        data["total_lengths"],
        data["rollout_ids"],
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        settings=from_args(BatchArgs, args),
        layout=layout,
    )
    num_samples = len(data["tokens"])
    shards = []
    for partition, micro_batches in zip(plan.partitions, plan.micro_batch_indices, strict=True):
        shard: dict[str, Any] = {
            "partition": partition,
            "micro_batch_indices": micro_batches,
            "num_microbatches": plan.num_microbatches,
            "global_batch_sizes": plan.global_batch_sizes,
        }
        for name, values in data.items():
            column = COLUMNS.get(name)
            is_per_sample = column.scope == "sample" if column is not None else len(values) == num_samples
            shard[name] = [values[position] for position in partition] if is_per_sample else values
        shards.append(_tensorize(shard))
    return shards, len(plan.dropped)


def _tensorize(shard: dict[str, Any]) -> dict[str, Any]:
    for name, values in shard.items():
        column = COLUMNS.get(name)
        if column is None or column.dtype is None:
            continue
        dtype = getattr(torch, column.dtype)
        if name == "rollout_mask_sums":
            shard[name] = torch.tensor(values, dtype=dtype)
        else:
            shard[name] = [torch.as_tensor(value, dtype=dtype) for value in values]
    return shard
