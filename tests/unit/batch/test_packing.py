"""Packing: rows and targets against a loop over samples."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from slime.batch.packing import pack
from slime.utils.errors import DataError


@pytest.mark.parametrize("seed", range(30))
def test_rows_targets_positions_and_segments_equal_a_loop_over_samples(seed):
    rng = random.Random(seed)
    tokens, responses = [], []
    for _ in range(rng.randint(1, 5)):
        prompt, response = rng.randint(1, 6), rng.randint(0, 6)
        tokens.append(torch.tensor([rng.randint(1, 99) for _ in range(prompt + response)]))
        responses.append(response)
    multiple = rng.choice([1, 4, 7, 64])
    packed = pack(tokens, responses, pad_multiple=multiple)

    flat, positions, borders, rows, targets = [], [], [0], [], []
    for sample, response in zip(tokens, responses, strict=True):
        start = len(flat)
        flat += sample.tolist()
        positions += range(len(sample))
        borders.append(len(flat))
        for t in range(len(sample) - response, len(sample)):
            rows.append(start + t - 1)
            targets.append(sample[t].item())
    padding = -len(flat) % multiple
    if padding:
        flat += [0] * padding
        positions += range(padding)
        borders.append(len(flat))
    assert packed.tokens.tolist() == [flat]
    assert packed.position_ids.tolist() == [positions]
    assert packed.cu_seqlens.tolist() == list(packed.borders) == borders
    is_padding = [False] * (len(flat) - padding) + [True] * padding
    assert (packed.is_padding is None) if not padding else (packed.is_padding.tolist() == [is_padding])
    assert packed.max_seqlen == max(b - a for a, b in itertools.pairwise(borders))
    assert packed.response_rows.tolist() == rows
    assert packed.response_targets.tolist() == targets
    assert packed.tokens.shape[1] % multiple == 0
    assert (packed.cu_seqlens.dtype, packed.response_rows.dtype) == (torch.int32, torch.int64)
    assert packed.tokens[0, packed.response_rows + 1].tolist() == targets


@pytest.mark.parametrize(("lengths", "responses"), [([3], [3]), ([0], [0]), ([2, 3], [1, 4]), ([2], [-1])])
def test_a_response_without_a_token_to_predict_it_from_is_an_error(lengths, responses):
    with pytest.raises(DataError, match="at least one prompt token"):
        pack([torch.ones(n, dtype=torch.int64) for n in lengths], responses)


def test_no_samples_is_an_error():
    with pytest.raises(DataError, match="without samples"):
        pack([], [])
