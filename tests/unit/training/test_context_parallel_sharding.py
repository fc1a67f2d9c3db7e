"""The tokens of a context-parallel rank, against a plain loop over segments and chunks."""

from __future__ import annotations

import pytest
import torch

from slime.backends.training.context_parallel import Sharding, shard, zigzag_rows
from slime.backends.training.data import row_multiple
from slime.batch.arguments import BatchArgs
from slime.batch.packing import pack
from slime.utils import accelerator
from slime.utils.accelerator import CPUAccelerator, CUDAAccelerator

_LENGTHS = ([1], [2, 1], [5, 16, 3], [1, 1, 1, 40])


def _chunks(lengths: list[int], rank: int, size: int) -> list[int]:
    rows, begin = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            rows += range(begin + index * chunk, begin + (index + 1) * chunk)
        begin += length
    return rows


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_holds_one_chunk_from_the_front_and_its_mirror_image_of_every_segment(size: int) -> None:
    lengths = [2 * size, 6 * size, 4 * size]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    held = [zigzag_rows(bounds, rank, size).tolist() for rank in range(size)]
    assert held == [_chunks(lengths, rank, size) for rank in range(size)]
    assert sorted(row for rows in held for row in rows) == list(range(sum(lengths)))


@pytest.mark.parametrize("sequence_multiple", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", _LENGTHS, ids=str)
def test_the_ranks_together_predict_every_response_token_once_from_the_right_row(
    lengths: list[int], size: int, sequence_multiple: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, 99, (length,), generator=generator) for length in lengths]
    responses = [max(length - 1, 0) for length in lengths]
    expected = torch.cat([sample[1:] for sample in tokens])
    seen = torch.zeros(len(expected), dtype=torch.int64)
    for rank in range(size):
        sharding = Sharding(cp_rank=rank, cp_size=size, sequence_multiple=sequence_multiple)
        packed = pack(tokens, responses, segment_multiple=sharding.segment_multiple, pad_multiple=sharding.pad_multiple)
        part = shard(packed, sharding)
        local = part.local
        assert local.tokens.size(1) * size == packed.tokens.size(1)
        assert local.tokens.size(1) % sequence_multiple == 0
        assert part.num_response_tokens == len(expected)
        assert torch.equal(local.response_targets, expected[part.response_index])
        # the row holds the token before the target, at the position before the target's
        before = torch.cat([sample[:-1] for sample in tokens])[part.response_index]
        assert torch.equal(local.tokens[0, local.response_rows], before)
        positions = torch.cat([torch.arange(length - 1) for length in lengths])[part.response_index]
        assert torch.equal(local.position_ids[0, local.response_rows], positions)
        seen[part.response_index] += 1
    assert seen.tolist() == [1] * len(expected)


def test_every_segment_is_cut_evenly_and_padding_is_a_segment_of_its_own() -> None:
    sharding = Sharding(cp_rank=0, cp_size=2, sequence_multiple=3)
    packed = pack(
        [torch.arange(1, 6), torch.arange(1, 3)],
        [2, 1],
        segment_multiple=sharding.segment_multiple,
        pad_multiple=sharding.pad_multiple,
    )
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 0, 0]]
    assert packed.cu_seqlens.tolist() == [0, 8, 12]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert packed.response_targets.tolist() == [4, 5, 2]
    assert packed.is_padding is not None
    assert packed.is_padding.nonzero()[:, 1].tolist() == [5, 6, 7, 10, 11]
    held = shard(packed, sharding).local
    assert held.is_padding is not None
    assert torch.equal(held.is_padding, packed.is_padding[:, [0, 1, 6, 7, 8, 11]])


def test_rows_are_padded_to_sizes_that_repeat_on_cuda_or_on_request() -> None:
    assert row_multiple(BatchArgs(data_pad_size_multiplier=16)) == 16
    try:
        accelerator.set_accelerator(CPUAccelerator())
        assert row_multiple(BatchArgs()) == 1
        accelerator.set_accelerator(CUDAAccelerator())
        assert row_multiple(BatchArgs()) == 128
    finally:
        accelerator.reset_accelerator()
