"""The public reductions, against means that are counted by hand."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.batch.balance import get_reverse_idx, greedy_partition
from slime.compat.measures import (
    _TensorboardAdapter,
    gather_and_reduce_log_dict,
    reduce_train_step_metrics,
    rollout_log_metric_contribution,
)
from slime.data.sample import Sample
from slime.ray.rollout import RolloutManager
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


def test_partitions_take_the_lightest_set_and_equal_sizes_on_request() -> None:
    assert greedy_partition([5, 4, 3, 1], 2, equal_size=False) == [[0, 3], [1, 2]]
    assert greedy_partition([9, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="3 items cannot be divided into 2 sets of equal size"):
        greedy_partition([1, 2, 3], 2, equal_size=True)
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_the_managers_conversions_work_on_any_object_with_the_hooks() -> None:
    manager: Any = RolloutManager.__ray_metadata__.modified_class
    args = Namespace(advantage_estimator="grpo", n_samples_per_prompt=2, rewards_normalization=True)
    own = SimpleNamespace(
        args=args, custom_reward_post_process_func=None, custom_convert_samples_to_train_data_func=None
    )
    samples = [
        Sample(group_index=0, index=i, tokens=[7, 8], response_length=1, reward=reward)
        for i, reward in enumerate((1.0, 3.0))
    ]
    raw, rewards = manager._post_process_rewards(own, samples)
    assert (raw, rewards) == ([1.0, 3.0], pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5))
    data = manager._convert_samples_to_train_data(own, samples)
    assert (data["raw_reward"], data["rewards"]) == (raw, rewards)
    own.custom_reward_post_process_func = lambda args, samples: ([1.0, 2.0], [3.0, 4.0])
    assert manager._convert_samples_to_train_data(own, samples)["rewards"] == [3.0, 4.0]
    own.custom_convert_samples_to_train_data_func = lambda args, samples: data | {"tokens": [[1, 2], [3, 4]]}
    assert manager._convert_samples_to_train_data(own, samples)["tokens"] == [[1, 2], [3, 4]]


def test_the_adapter_of_tensorboard_writes_scalars_to_the_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    args = Namespace(tb_project_name=None, tb_experiment_name=None, experiment_name=None)
    with pytest.raises(ValueError, match="TENSORBOARD_DIR"):
        _TensorboardAdapter(args)
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    try:
        _TensorboardAdapter(args).log({"reward": 0.5}, 3)
        _TensorboardAdapter(args).finish()
    finally:
        _TensorboardAdapter.clear_instances()
    written = EventAccumulator(str(tmp_path)).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in written] == [(3, 0.5)]
