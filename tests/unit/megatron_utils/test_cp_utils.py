"""Functions for users' importance weights and reducers: responses are whole, sums of means match a plain loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import cp_utils
from slime.backends.megatron_utils.cp_utils import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    slice_log_prob_with_cp,
    slice_with_cp,
)
from slime.backends.training.context_parallel import Sharding, shard
from slime.batch.packing import pack

LENGTHS = [3, 2]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([0, 0])]
VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


@pytest.mark.parametrize(
    ("denominators", "per_token", "expected"),
    [
        (None, False, (1 + 4) / 2),
        ([torch.tensor(4), torch.tensor(4)], False, (1 + 4) / 4),
        (torch.tensor([5.0, 1.0]), False, (1 + 4) / 5),
        (None, True, 1 + 4),
    ],
)
def test_the_sum_of_means_is_that_of_a_plain_loop(denominators: object, per_token: bool, expected: float) -> None:
    reduce = get_sum_of_sample_mean([5, 4], LENGTHS, MASKS, denominators, per_token)
    assert reduce(VALUES).item() == pytest.approx(expected)


def test_a_whole_response_stays_as_it_is_and_a_part_of_one_is_refused() -> None:
    row = torch.arange(3.0)
    assert all_gather_with_cp(row, 5, 3) is row
    assert slice_log_prob_with_cp([0.1, 0.2], 4, 2) == [0.1, 0.2]
    with pytest.raises(ValueError, match="the 4 values of a whole response, got 3"):
        all_gather_with_cp(row, 8, 4)


def stand_on(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> Sharding:
    mpu = SimpleNamespace(
        get_context_parallel_rank=lambda: rank,
        get_context_parallel_world_size=lambda: size,
        get_context_parallel_group=lambda: None,
    )
    monkeypatch.setitem(cp_utils.sys.modules, "megatron.core.parallel_state", mpu)  # type: ignore[arg-type]
    return Sharding(cp_rank=rank, cp_size=size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("total", "response"), [(2, 1), (16, 5), (17, 16), (40, 40 - 1), (13, 3)])
def test_chunks_and_offsets_are_those_that_the_trainer_cuts(
    monkeypatch: pytest.MonkeyPatch, size: int, total: int, response: int
) -> None:
    sample = torch.arange(1, total + 1)
    packed = pack([sample], [response], segment_multiple=2 * size, pad_multiple=2 * size)
    for rank in range(size):
        part = shard(packed, stand_on(monkeypatch, rank, size))
        assert torch.equal(slice_with_cp(sample, 0), part.local.tokens[0])
        chunk, chunks, rows, tokens = get_logits_and_tokens_offset_with_cp(total, response)
        assert chunk * 2 * size == packed.tokens.size(1)
        held = [range(*span) for span in chunks]
        assert [first for first, _ in chunks] == [rank * chunk, (2 * size - 1 - rank) * chunk]
        positions = [position for span in rows for position in range(*span)]
        assert [position in held[0] or position in held[1] for position in positions] == [True] * len(positions)
        assert torch.equal(sample[[p for span in tokens for p in range(*span)]], part.local.response_targets)
        assert [p + 1 - (total - response) for p in positions] == part.response_index.tolist()


def test_a_slice_is_padded_by_a_value_or_by_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, 0, 2)
    rows = torch.arange(6.0).reshape(3, 2)
    assert slice_with_cp(rows, -1).tolist() == [[0, 1], [-1, -1]]
    repeated = slice_with_cp(rows, lambda tensor, count: torch.cat([tensor, tensor[-1:].expand(count, -1)]))
    assert repeated.tolist() == [[0, 1], [4, 5]]


def test_one_rank_holds_the_whole_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, 0, 1)
    sample = torch.arange(5)
    assert slice_with_cp(sample, 0) is sample
    with pytest.raises(ValueError, match="--context-parallel-size is 1"):
        get_logits_and_tokens_offset_with_cp(5, 2)
