"""Sets of ids per row, against the dense mask of the same sets."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms.logprobs import SamplingMask, log_probs_and_entropy
from tests.unit.algorithms.test_logprobs import CASES, as_sets, nucleus_reference, some_ids
from tests.unit.algorithms.two_ranks import computed

LENGTHS = (3, 0, 4)  # response tokens of three samples
NUM_IDS = 11


def dense_sets() -> list[torch.Tensor]:
    """Per sample ``[R_i, NUM_IDS]`` bool, with one row without any id."""
    g = torch.Generator().manual_seed(3)
    sets = [torch.rand(length, NUM_IDS, generator=g) < 0.4 for length in LENGTHS]
    sets[2][1] = False
    return sets


def mask_of(sets: list[torch.Tensor], **kwargs: torch.Tensor) -> SamplingMask:
    ids, offsets = zip(*map(as_sets, sets), strict=True)
    return SamplingMask.of(ids, offsets, **kwargs)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda c: f"v{c['vocab_size']}-t{c['temperature']}-c{c['chunk_size']}")
def test_sets_of_ids_give_the_log_probs_and_gradients_of_the_dense_mask(case):
    keep = some_ids(case)
    keep[0, case["targets"][0]] = True  # an engine's set always holds the token
    wanted = nucleus_reference(case, keep)
    actual = computed(case, case["logits"], keep=mask_of([keep]))
    for name in ("log_probs", "grad"):
        torch.testing.assert_close(actual[name], wanted[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first_id", [0, 4, 9])
def test_what_is_dropped_is_the_complement_on_every_shard_and_rows_without_ids_keep_everything(first_id):
    dense = torch.cat(dense_sets())
    wanted = ~dense
    wanted[~dense.any(1)] = False
    mask = mask_of(dense_sets())
    assert len(mask) == sum(LENGTHS)
    for rows in (slice(0, 7), slice(2, 6), slice(5, 7), slice(3, 3)):
        shard = mask.dropped(rows, first_id, min(4, NUM_IDS - first_id))
        assert torch.equal(shard, wanted[rows, first_id : first_id + 4])


def test_selected_rows_are_those_of_the_whole_in_the_given_order():
    positions = torch.tensor([6, 0, 4, 2])
    whole = mask_of(dense_sets()).dropped(slice(0, 7), 0, NUM_IDS)
    some = mask_of(dense_sets(), select=positions)
    assert torch.equal(some.dropped(slice(0, 4), 0, NUM_IDS), whole[positions])


def test_offsets_that_do_not_fit_the_ids_and_rows_that_do_not_fit_the_logits_are_refused():
    with pytest.raises(ValueError, match="sample 1"):
        SamplingMask.of([torch.tensor([3]), torch.tensor([3])], [torch.tensor([0, 1]), torch.tensor([0, 2])])
    with pytest.raises(ValueError, match="sets for 7 rows, the logits have 2"):
        log_probs_and_entropy(torch.zeros(2, NUM_IDS), torch.zeros(2).long(), keep=mask_of(dense_sets()))
