"""Flat ranges of a tensor as boxes, and the place of a parameter's part in the tensors of a checkpoint."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 2, 4), (1, 1, 6), (2, 1, 3)])
def test_the_boxes_of_a_range_hold_its_numbers_in_their_order(shape: tuple[int, ...]) -> None:
    from slime.backends.megatron_utils.checkpoint.shard_files import boxes

    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for begin, end in itertools.combinations_with_replacement(range(numel + 1), 2):
        found = list(boxes(shape, begin, end))
        assert len(found) <= 2 * len(shape) - 1
        parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in found]
        assert torch.equal(torch.cat([torch.zeros(0, dtype=torch.long), *parts]), torch.arange(begin, end))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_range_of_a_fused_parameter_goes_to_the_parts_that_the_checkpoint_has(axis: int) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from slime.backends.megatron_utils.checkpoint.shard_files import _boxes_of

    parameter = torch.arange(24.0).view(4, 6)

    def build(key: str, tensor: torch.Tensor, replica_id: object, _: object) -> list[ShardedTensor]:
        # as rank 1 of 2: its gate and up follow those of rank 0, with an axis for the layer before
        offsets = [((0, 2, 3), (axis + 1, place, 4)) for place in (1, 3)]
        return [
            ShardedTensor.from_rank_offsets(key, half, *offset, replica_id=replica_id, prepend_axis_num=1)
            for half, offset in zip(tensor.chunk(2, dim=axis), offsets, strict=True)
        ]

    place = ShardedTensorFactory("w", parameter, build, torch.cat, (0, 0, 0))
    saved = torch.full((3, 8, 6) if axis == 0 else (3, 4, 12), -1.0)
    for begin, end in ((0, 1), (1, 5), (5, 17), (17, 24)):
        state = parameter.flatten()[begin:end].clone()
        for box in _boxes_of(state, begin, "w", place, (0, 0, 0)):
            saved[tuple(slice(o, o + n) for o, n in zip(box.global_offset, box.local_shape, strict=True))] = box.data
            assert box.data.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()  # live, no copy
    whole = torch.full_like(saved, -1.0)
    for part in build("w", parameter, (0, 0, 0), None):
        whole[part.global_slice()] = part.data
    assert torch.equal(saved, whole)
    assert (saved >= 0).sum() == 24
