"""The public reductions, against means that are counted by hand."""

from __future__ import annotations

import logging

import pytest
import torch

from slime.compat.measures import (
    gather_and_reduce_log_dict,
    reduce_train_step_metrics,
    rollout_log_metric_contribution,
)
from slime.utils.memory_utils import available_memory, clear_memory, print_memory


def test_a_step_is_a_mean_over_rollouts_or_over_tokens() -> None:
    losses = [
        {"keys": ["loss", "kl"], "values": torch.tensor([6.0, 1.0, 3.0])},
        {"keys": ["loss", "kl"], "values": torch.tensor([4.0, 2.0, 5.0])},
    ]
    common = {"step_global_batch_size": 3, "dp_with_cp_group": None}
    by_rollout = reduce_train_step_metrics(losses, calculate_per_token_loss=False, cp_size=1, **common)
    assert by_rollout == {"loss": 1.0, "kl": pytest.approx(8 / 3)}
    by_token = reduce_train_step_metrics(losses, calculate_per_token_loss=True, cp_size=2, **common)
    assert by_token == {"loss": pytest.approx(0.6), "kl": pytest.approx(1.6)}


def test_contributions_of_ranks_add_up_to_the_mean_over_rollouts() -> None:
    means_by_rank = [[1.0, 2.0], [3.0, 4.0]]  # two data-parallel ranks, each a half of every token: cp of two
    parts = [
        rollout_log_metric_contribution(sum(means) / 2, cp_size=2, num_rollouts_in_rollout=4, dp_size=2)
        for means in means_by_rank
    ]
    assert sum(part[0] for part in parts) / sum(part[1] for part in parts) == 2.5


def test_sums_and_counts_reduce_to_their_ratio() -> None:
    values = {"mean": (6.0, 4.0), "nothing": (0.0, 0.0), "plain": 3.0}
    reduced = gather_and_reduce_log_dict(values, dp_size=1, dp_src_rank=0, dp_group=None)
    assert reduced == {"mean": 1.5, "nothing": 0.0, "plain": 3.0}


def test_memory_is_told_in_words_that_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    clear_memory(clear_host_memory=True)
    found = available_memory()
    assert 0 < float(found["host_available_GB"]) <= float(found["host_total_GB"])
    with caplog.at_level(logging.INFO):
        print_memory("after the step", clear_before_print=True)
    assert "[rank 0] memory after the step: {'gpu'" in caplog.text
