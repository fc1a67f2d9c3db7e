"""The harness of the multi-process tests: results by rank, every rank's error, a deadline, no processes left over."""

from __future__ import annotations

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.limits import unloaded_time

_CASES = "tests.dist.harness_cases"


def test_ranks_talk_to_each_other_and_their_results_come_back(ranks: ForkServer) -> None:
    for world_size in (2, 3):
        results = ranks.run(f"{_CASES}:add_ranks", world_size, value=0.5)
        expected = torch.tensor([0.5 * world_size + sum(range(world_size))])
        assert len(results) == world_size
        assert all(torch.equal(result, expected) for result in results)


def test_the_error_of_one_rank_ends_the_case_with_its_traceback(ranks: ForkServer) -> None:
    with pytest.raises(AssertionError, match="ValueError: only rank one"):
        ranks.run(f"{_CASES}:fail_on_one", 2)


def test_a_rank_that_hangs_is_ended_at_the_deadline(ranks: ForkServer) -> None:
    started = unloaded_time()
    with pytest.raises(AssertionError, match="not finished in time"):
        ranks.run(f"{_CASES}:hang_on_one", 2, timeout_s=1.0)
    assert unloaded_time() - started < 10
