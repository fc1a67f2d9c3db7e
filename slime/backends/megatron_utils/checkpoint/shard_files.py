"""The shards of a checkpoint: which rank writes which tensors, and the files, in the format of torch's checkpoints.

    plan     every rank lists its tensors; data-parallel copies are divided among their ranks; rank 0 gets all lists
    write    ``pieces``: this rank's tensors to its files ``__<rank>_<n>.distcp``
    finish   rank 0 writes ``.metadata``: where each tensor is
    read     each rank reads its parts into the live tensors

Nothing here uses a device for communication: ranks exchange lists in the gloo group for files.

The states of Megatron's sharded optimizer are parts of whole tensors, without gathering or copying them. A
data-parallel rank has the states of a flat range of each parameter. Such a range is a few boxes of the parameter:

    range 3..13 of [4, 5]    row 0, columns 3..5  |  row 1, all columns  |  row 2, columns 0..3

A box is a :class:`ShardedTensor` that views the live state. Saving reads it and loading writes it in place. The names
and shapes in the file are those of Megatron's ``fully_reshardable`` format, which has whole parameters. Files of either
form load on any layout.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from slime.backends.megatron_utils.precision import readable
from slime.backends.training.pieces import Piece, PlainPlanner, PlainReader, load_object
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
        planner = _Planner(
            shapes_validation_sharded_tensors=[entry for entry in tensors if not entry.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors=flexible,
        )
        load_state_dict(live, PlainReader(checkpoint_dir), no_dist=True, planner=planner)
        values = {key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in live.items()}
        loaded = torch_strategy._replace_sharded_keys_with_state_dict_keys(values, paths, names)
        torch_strategy._restore_dict_types(loaded, sharded_state_dict)
        return loaded


class _Planner(torch_strategy.MCoreLoadPlanner):
    load_bytes = PlainPlanner.load_bytes


def load_common(directory: str | Path) -> Any:
    """The values of a checkpoint that are not sharded."""
    return load_object(Path(directory) / COMMON_STATE_FNAME)


def sliced_states(
    optimizer: Any, model_state: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Main weights and moments of this rank: parameter number -> state name -> boxes.

    Takes the place of ``DistributedOptimizer.sharded_param_state_fs_model_space``.

    Args:
        model_state: the sharded state of the model, which has the parameters themselves as data.
    """
    places = {
        entry.data: entry
        for entry in nested_values(model_state)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    states: dict[int, dict[str, list[ShardedTensor]]] = {}
    for ranges in optimizer.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, of_parameter in bucket["param_map"].items():
                    found = optimizer._get_main_param_and_optimizer_states(parameter)
                    begin, place = of_parameter["param"].start, places[parameter]
                    # each data-parallel rank writes its own range, without copies
                    replica = (*place.replica_id[:2], optimizer.distributed_optimizer_instance_id)
                    states[len(states)] = {
                        name: list(_boxes_of(state, begin, f"optimizer.state.{name}.{place.key}", place, replica))
                        for name, state in found.items()
                        if state.dim() > 0  # the step is one number, in the parameter groups
                    }
    return states


def _boxes_of(
    state: torch.Tensor, begin: int, key: str, place: ShardedTensor | ShardedTensorFactory, replica: tuple[int, ...]
) -> Iterator[ShardedTensor]:
    """The boxes of ``state``, which belongs to the numbers from ``begin`` on of the flat parameter of ``place``."""
    end = begin + state.numel()
    for part, first, whole, offset in _contiguous_parts(key, place):
        low, high = max(begin, first), min(end, first + math.prod(whole))
        if low >= high:
            continue
        at = low - begin
        for corner, sizes in boxes(whole, low - first, high - first):
            numel = math.prod(sizes)
            shape = (1,) * part.prepend_axis_num + sizes
            corner = (0,) * part.prepend_axis_num + tuple(a + b for a, b in zip(offset, corner, strict=True))
            yield ShardedTensor(
                part.key,
                state[at : at + numel].view(shape),
                state.dtype,
                shape,
                part.global_shape,
                tuple(a + b for a, b in zip(part.global_offset, corner, strict=True)),
                axis_fragmentations=None,  # boxes have no regular grid
                replica_id=replica,
                allow_shape_mismatch=part.allow_shape_mismatch,
            )
            at += numel


def _contiguous_parts(
    key: str, place: ShardedTensor | ShardedTensorFactory
) -> Iterator[tuple[ShardedTensor, int, tuple[int, ...], tuple[int, ...]]]:
    """The tensors of the file that a parameter is stored in, in pieces that are contiguous in the parameter.

    Yields (tensor of the file, first number in the flat parameter, shape, offset in the tensor).
    """
    # A tensor without memory: the strides of its views show where in the parameter a part lies.
    whole = torch.empty(place.data.shape, device="meta")
    if isinstance(place, ShardedTensorFactory):
        parts = place.build_fn(key, whole, place.replica_id, None)
    else:
        parts = [replace(place, key=key, data=whole, dtype=whole.dtype)]
    for part in parts:
        if part.data.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            raise NotImplementedError(f"{place.key}: {part.key} of the checkpoint must be a view of the parameter")
        for piece, offset in _slices(part.data):
            yield part, int(piece.storage_offset()), tuple(piece.shape), offset


def _slices(view: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """``view`` as contiguous tensors of the same number of dimensions, with their offsets in it."""
    if view.is_contiguous():
        yield view, (0,) * view.dim()
        return
    for row in range(view.shape[0]):
        for piece, offset in _slices(view[row]):
            yield piece.unsqueeze(0), (row, *offset)


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The numbers ``begin`` to ``end`` of a flat tensor of ``shape`` as boxes (offset, sizes), in their order.

    At most 2 n - 1 boxes for n dimensions.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first = begin // row
    if begin % row == 0 and end % row == 0:
        yield (first, *(0,) * (len(shape) - 1)), ((end - begin) // row, *shape[1:])
    elif (end - 1) // row == first:
        for offset, sizes in boxes(shape[1:], begin - first * row, end - first * row):
            yield (first, *offset), (1, *sizes)
    else:
        low, high = -(-begin // row) * row, end // row * row
        for pair in ((begin, low), (low, high), (high, end)):
            yield from boxes(shape, *pair)
