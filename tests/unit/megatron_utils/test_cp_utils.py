"""What users' importance weights and reducers call: responses are whole, sums of means are those of a plain loop."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, get_sum_of_sample_mean, slice_log_prob_with_cp

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
