"""The training batch of each rollout in a file (``--save-debug-train-data``).

    {"format_version": 2, "rollout_id": int, "rank": int, "samples": [...], "dp_shards": [...], "raw_reward": [...]}

``samples[i]`` is one training row: every per-sample column of the trainer, log-probs and advantages included, with
``rollout_position`` (its place in the rollout and in a dump of ``--save-debug-rollout-data``), ``sample_index`` and
``data_parallel_rank``. ``dp_shards[i]`` is the schedule of a data-parallel rank.

Called by the trainer on one rank of every data-parallel rank. Knows tensors and groups, no backend.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.data.columns import column
from slime.data.dump_file import dump_path, write_dump

__all__ = ["build_dump_payload", "save_debug_train_data"]

logger = logging.getLogger(__name__)

_FLAG = "--save-debug-train-data"
_FORMAT_VERSION = 2
_LAYOUT_FIELDS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
_WHOLE_BATCH_FIELDS = ("raw_reward",)


def save_debug_train_data(
    template: str, *, rollout_id: int, rollout_data: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Path | None:
    """Gather the batches of the data-parallel ranks in ``group`` to its first rank, which writes them to one file.

    The file appears complete or not at all.

    Args:
        rollout_data: the rank's columns of ``slime.data.columns`` with whole responses.
        group: one process of each data-parallel rank. None for a single process.

    Returns:
        The file, on the rank that wrote it. None elsewhere, and if writing failed (which is logged).
    """
    shard = {name: _to_cpu(value) for name, value in rollout_data.items()}
    if group is None:
        rank, number, shards = 0, 0, [shard | {"rank": 0, "data_parallel_rank": 0}]
    else:
        rank, number = dist.get_rank(), dist.get_rank(group)
        shard |= {"rank": rank, "data_parallel_rank": number}
        # Only the first rank of the group receives.
        gathered: list[Any] | None = [None] * dist.get_world_size(group) if number == 0 else None
        dist.gather_object(shard, gathered, dst=dist.get_global_rank(group, 0), group=group)
        shards = gathered or []
    if number != 0:
        return None
    path = dump_path(_FLAG, template, rollout_id=rollout_id, rank=rank)
    payload = build_dump_payload(shards, rollout_id=rollout_id, writer_rank=rank)
    return path if write_dump(_FLAG, path, payload) else None


def build_dump_payload(dp_shards: Sequence[Mapping[str, Any]], *, rollout_id: int, writer_rank: int) -> dict[str, Any]:
    """The contents of the file.

    Args:
        dp_shards: for each data-parallel rank its columns, ``rank`` and ``data_parallel_rank``.
    """
    samples: list[dict[str, Any]] = []
    layouts: list[dict[str, Any]] = []
    for shard in dp_shards:
        num_samples = len(shard["tokens"])
        rows = [name for name, values in shard.items() if _is_per_sample(name, values, num_samples)]
        for index in range(num_samples):
            sample = {name: shard[name][index] for name in rows if name != "sample_indices"}
            sample["data_parallel_rank"] = shard["data_parallel_rank"]
            if "sample_indices" in shard:
                sample["sample_index"] = shard["sample_indices"][index]
            if "partition" in shard:
                sample["rollout_position"] = shard["partition"][index]
            samples.append(sample)
        rest = {name: value for name, value in shard.items() if name not in (*rows, *_WHOLE_BATCH_FIELDS)}
        layouts.append(rest | {"sample_indices": shard.get("sample_indices")})
    payload: dict[str, Any] = {
        "format_version": _FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": writer_rank,
        "samples": _in_order(samples),
        "dp_shards": layouts,
    }
    for name in _WHOLE_BATCH_FIELDS:
        if name in dp_shards[0]:
            payload[name] = dp_shards[0][name]
    return payload


def _in_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # The order of the rollout, so that dumps of different parallel layouts can be compared.
    for key in ("rollout_position", "sample_index"):
        if all(sample.get(key) is not None for sample in samples):
            return sorted(samples, key=lambda sample: sample[key])
    logger.warning("the batch has neither positions nor sample numbers: the dump is in the order of the ranks")
    return samples


def _is_per_sample(name: str, values: Any, num_samples: int) -> bool:
    if name in _LAYOUT_FIELDS or name in _WHOLE_BATCH_FIELDS or column(name).per != "sample":
        return False
    return isinstance(values, list | tuple | torch.Tensor) and len(values) == num_samples


def _to_cpu(value: Any) -> Any:
    match value:
        case torch.Tensor():
            # a copy: torch.save would write the whole storage of a row that is a view
            return value.detach().to("cpu", copy=True)
        case dict():
            return {name: _to_cpu(item) for name, item in value.items()}
        case list() | tuple():
            return [_to_cpu(item) for item in value]
        case _:
            return value
