"""The shards of a checkpoint: which rank writes which tensors, and the files, in the format of torch's checkpoints.

    plan     every rank lists its tensors; data-parallel copies are divided among their ranks; rank 0 gets all lists
    write    ``pieces``: this rank's tensors to its files ``__<rank>_<n>.distcp``
    finish   rank 0 writes ``.metadata``: where each tensor is
    read     each rank reads its parts into the live tensors

Nothing here uses a device for communication: ranks exchange lists in the gloo group for files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from slime.backends.megatron_utils.precision import readable
from slime.backends.training.pieces import Piece
from slime.utils.distributed_utils import do_on_first_rank, files_group

_MAX_BYTES = 128 * 1024**2  # of a tensor in a file: the writer holds one per file in host memory


def plan(state: dict[str, Any], directory: Path) -> tuple[list[Piece], Metadata | None, str | None]:
    """The pieces that this rank writes. Rank 0 writes the values without shards. A collective.

    Args:
        state: consumed.

    Returns:
        The pieces, on rank 0 the metadata of all ranks, and on all ranks an error of rank 0.
    """
    converted = _without_fp8(state)
    sharded, common = save_preprocess(state, validate_access_integrity=False)  # rank 0 checks the lists below
    _divide_copies(sharded)
    pieces = [
        piece
        for entry in nested_values(sharded)
        if is_main_replica(entry.replica_id)
        for piece in _pieces(entry, converted)
    ]
    lists: list[Any] = [None] * dist.get_world_size()
    mine = SavePlan([piece.item for piece in pieces])
    dist.gather_object(mine, lists if dist.get_rank() == 0 else None, dst=0, group=files_group())
    metadata: list[Metadata] = []

    def on_first_rank() -> None:
        torch.save(common, directory / COMMON_STATE_FNAME)
        # raises if parts of a tensor overlap or are missing
        metadata.append(DefaultSavePlanner(flatten_state_dict=False).create_global_plan(lists)[1])

    failure = do_on_first_rank(on_first_rank)
    return pieces, metadata[0] if metadata else None, failure


# The data-parallel group and its group for lists. Another data-parallel group needs another one.
_lists_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


def _divide_copies(sharded: dict[str, Any]) -> None:
    """Let one of the data-parallel ranks write a tensor that all of them have, each about as many bytes."""
    global _lists_group
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1:
        return
    if dist.get_backend(group) != "gloo":
        if _lists_group is None or _lists_group[0] is not group:
            ranks = dist.get_process_group_ranks(group)
            _lists_group = group, dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        group = _lists_group[1]
    writers = determine_main_replica_uniform_distribution(sharded, group)
    distribute_main_replicas_with_precomputed_distribution(sharded, group, writers)


def _without_fp8(state: dict[str, Any]) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
    """Replace the FP8 weights of ``state`` by tensors of the meta device. Returns these and the weights, by memory.

    A converted weight has twice the bytes. So a weight is converted when a piece of it is written.
    """
    found = {}
    for entry in nested_values(state):
        weight = entry.data if isinstance(entry, ShardedBase) else None
        if isinstance(weight, torch.Tensor) and fp8_utils.is_float8tensor(weight):
            entry.data = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            found[entry.data.untyped_storage()._cdata] = (entry.data, weight)
    return found


def _converted(weight: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The numbers of ``weight`` at the places of ``part``, a view without data."""
    with torch.cuda.device_of(weight):  # a new thread begins on device 0
        return readable(weight).as_strided(part.size(), part.stride(), part.storage_offset())


def _pieces(
    entry: ShardedTensor | ShardedObject, converted: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[Piece]:
    if isinstance(entry, ShardedObject):
        data = io.BytesIO()
        torch.save([entry.data], data)
        yield Piece(WriteItem(MetadataIndex(entry.unique_key), WriteItemType.BYTE_IO), data)
        return
    whole = entry.data.detach()
    _, weight = converted.get(whole.untyped_storage()._cdata, (None, None))
    whole = whole.view((1,) * entry.prepend_axis_num + tuple(whole.shape))
    for part, offset in _cut(whole, tuple(entry.global_offset)):
        index = MetadataIndex(entry.key, torch.Size(offset))
        where = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offset), part.size()),
            # those of the file: a pinned or 8-bit tensor on a device is the same there
            properties=TensorProperties(dtype=part.dtype),
            size=torch.Size(entry.global_shape),
        )
        make = None if weight is None else partial(_converted, weight, part)
        yield Piece(WriteItem(index, WriteItemType.SHARD, tensor_data=where), part, make)


def _cut(tensor: torch.Tensor, offset: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Parts of at most ``_MAX_BYTES``, cut along the first dimension with more than one row."""
    dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
    if dim is None or tensor.nbytes <= _MAX_BYTES:
        yield tensor, offset
        return
    rows = max(1, _MAX_BYTES * tensor.shape[dim] // tensor.nbytes)
    for begin in range(0, tensor.shape[dim], rows):
        part = tensor.narrow(dim, begin, min(rows, tensor.shape[dim] - begin))
        yield from _cut(part, (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :]))


def finish(directory: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Write the metadata files. On rank 0, after all ranks have written."""
    FileSystemWriter(directory).finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


class LocalReader(torch_strategy.TorchDistLoadShardedStrategy):
    """Reads this rank's parts without any exchange with other ranks. The caller compares errors."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Fill the tensors of ``sharded_state_dict``, and return it with tensors and objects in place of shards."""
        tensors = [entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor)]
        flexible = {entry.key: entry for entry in tensors if entry.allow_shape_mismatch}
        by_key, paths, names = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        live = torch_strategy.mcore_to_pyt_state_dict(by_key, True)
        planner = torch_strategy.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[entry for entry in tensors if not entry.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors=flexible,
        )
        load_state_dict(live, FileSystemReader(checkpoint_dir), no_dist=True, planner=planner)
        values = {key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in live.items()}
        loaded = torch_strategy._replace_sharded_keys_with_state_dict_keys(values, paths, names)
        torch_strategy._restore_dict_types(loaded, sharded_state_dict)
        return loaded
