"""The states of Megatron's sharded optimizer as parts of whole tensors, without gathering or copying them.

A data-parallel rank has the states of a flat range of each parameter. Such a range is a few boxes of the parameter:

    range 3..13 of [4, 5]    row 0, columns 3..5  |  row 1, all columns  |  row 2, columns 0..3

A box is a :class:`ShardedTensor` that views the live state. Saving reads it and loading writes it in place. The names
and shapes in the file are those of Megatron's ``fully_reshardable`` format, which has whole parameters. Files of either
form load on any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


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
        for piece, offset in _pieces(part.data):
            yield part, int(piece.storage_offset()), tuple(piece.shape), offset


def _pieces(view: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """``view`` as contiguous tensors of the same number of dimensions, with their offsets in it."""
    if view.is_contiguous():
        yield view, (0,) * view.dim()
        return
    for row in range(view.shape[0]):
        for piece, offset in _pieces(view[row]):
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
