"""Metric names and values against numbers worked out by hand."""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.observability import metric_utils
from slime.observability.rollout_metrics import (
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
    eval_metrics,
)
from slime.utils.errors import DataError


def settings(**more: Any) -> Namespace:
    values: dict[str, Any] = {
        "reward_key": None,
        "advantage_estimator": "grpo",
        "log_reward_category": None,
        "log_passrate": False,
        "rollout_num_gpus": 2,
        "n_samples_per_eval_prompt": 2,
        "eval_datasets": [],
    }
    return Namespace(**(values | more))


def sample(length: int = 4, reward: Any = 0.0, group: int = 0, **more: Any) -> Sample:
    made = Sample(group_index=group, response_length=length, reward=reward, status=Sample.Status.COMPLETED)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_lengths_count_trained_tokens_only() -> None:
    samples = [sample(4), sample(6, loss_mask=[1, 0, 0, 0, 0, 1]), sample(9)]
    metrics = compute_metrics_from_samples(settings(), samples)
    found = {name: metrics[f"response_len/{name}"] for name in ("mean", "median", "max", "min")}
    assert found == {"mean": 5.0, "median": 4.0, "max": 9.0, "min": 2.0}


def test_the_names_are_those_of_the_dashboards() -> None:
    metrics = compute_metrics_from_samples(settings(), [sample(reward=1.0), sample(reward=0.0)])
    assert set(metrics) == {
        *(f"response_len/{name}" for name in ("mean", "median", "max", "min")),
        *("prefix_cache_hit_rate", "avg_cached_tokens_per_sample", "repetition_frac", "truncated_ratio"),
    }


def test_groups_without_a_signal_are_counted_by_their_reward() -> None:
    rewards = [(0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0), (2, 1.0), (2, 1.0), (3, 0.04), (3, 0.04)]
    samples = [sample(reward=reward, group=group) for group, reward in rewards]
    metrics = compute_metrics_from_samples(settings(), samples)
    counts = {name: value for name, value in metrics.items() if name.startswith("zero_std/")}
    assert counts == {"zero_std/count_1.0": 2.0, "zero_std/count_0.0": 1.0}
    ppo = compute_metrics_from_samples(settings(advantage_estimator="ppo"), samples)
    assert not [name for name in ppo if name.startswith("zero_std/")]


def test_rewards_that_are_dicts_are_read_by_their_key() -> None:
    samples = [sample(reward={"score": 1.0, "kind": "format"}) for _ in range(3)]
    samples.append(sample(reward={"score": 1.0, "kind": "wrong"}))
    metrics = compute_metrics_from_samples(settings(reward_key="score", log_reward_category="kind"), samples)
    assert metrics["zero_std/count_1.0"] == 1.0
    assert (metrics["error_cat/format"], metrics["error_cat/wrong"]) == (0.75, 0.25)


@pytest.mark.parametrize("rewards", [[{"acc": 1.0}, {"acc": 1.0}], [1.0, 1.0]])
def test_an_evaluation_may_return_other_rewards_than_those_of_training(rewards: list[Any]) -> None:
    args = settings(reward_key="score", eval_reward_key="acc")
    data = {"set": {"rewards": [1.0, 1.0], "samples": [sample(reward=reward) for reward in rewards]}}
    metrics = eval_metrics(args, data)
    assert (metrics["eval/set"], metrics["eval/set/zero_std/count_1.0"]) == (1.0, 1.0)


def test_truncation_repetition_and_cache_are_shares() -> None:
    samples = [sample(), sample(), sample(), sample()]
    samples[0].status = Sample.Status.TRUNCATED
    samples[1].response = "again and again " * 1000
    samples[2].prefix_cache_info.add({"cached_tokens": 6, "prompt_tokens": 8})
    metrics = compute_metrics_from_samples(settings(), samples)
    assert (metrics["truncated_ratio"], metrics["repetition_frac"]) == (0.25, 0.25)
    assert (metrics["prefix_cache_hit_rate"], metrics["avg_cached_tokens_per_sample"]) == (0.75, 1.5)


def test_speculation_is_reported_only_when_the_engine_speculates() -> None:
    one = sample()
    one.spec_info.add(
        {"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 4, "spec_verify_ct": 2, "completion_tokens": 6}
    )
    metrics = compute_metrics_from_samples(settings(), [one])
    assert (metrics["spec_accept_rate"], metrics["spec_accept_length"]) == (0.75, 3.0)
    assert "spec_accept_rate" not in compute_metrics_from_samples(settings(), [sample()])


def test_nucleus_sizes_are_averaged_over_trained_tokens_of_kept_samples() -> None:
    kept = sample(3, loss_mask=[1, 0, 1], rollout_top_p_token_offsets=[0, 2, 10, 14])
    removed = sample(1, rollout_top_p_token_offsets=[0, 99], remove_sample=True)
    assert compute_metrics_from_samples(settings(), [kept, removed, sample()])["top_p_kept_vocab_per_token"] == 3.0


def test_speed_is_per_device_and_for_the_longest_sample() -> None:
    samples = [sample(10), sample(30, loss_mask=[1] * 15 + [0] * 15), sample(20)]
    metrics = compute_perf_metrics_from_samples(settings(), samples, 5.0)
    assert metrics == {
        "rollout_time": 5.0,
        "tokens_per_gpu_per_sec": 6.0,
        "longest_sample_tokens_per_sec": 6.0,
        "effective_tokens_per_gpu_per_sec": 4.5,
        "longest_effective_sample_tokens_per_sec": 4.0,
    }
    assert "tokens_per_gpu_per_sec" not in compute_perf_metrics_from_samples(settings(rollout_num_gpus=0), samples, 5.0)


def test_time_outside_generation_is_taken_off_the_longest_sample() -> None:
    samples = [sample(10, non_generation_time=1.0), sample(30, non_generation_time=3.0)]
    metrics = compute_perf_metrics_from_samples(settings(), samples, 5.0)
    assert metrics["non_generation_time/mean"] == 2.0
    assert metrics["longest_sample_non_generation_time"] == 3.0
    assert metrics["longest_sample_tokens_per_sec_without_non_generation"] == 15.0


def test_no_samples_give_no_metrics_and_no_error() -> None:
    assert compute_metrics_from_samples(settings(), []) == {}
    assert compute_perf_metrics_from_samples(settings(), [], 1.0) == {"rollout_time": 1.0}
    assert eval_metrics(settings(), {"a": {"rewards": []}}) == {}


def test_evaluation_reports_mean_truncation_and_pass_rate_of_each_set() -> None:
    own = Namespace(name="math", n_samples_per_eval_prompt=4)
    data = {
        "math": {"rewards": [1, 0, 0, 0, 0, 0, 0, 0], "truncated": [True] + [False] * 7, "samples": [sample(7)]},
        "plain": {"rewards": [1.0, 0.0]},
    }
    metrics = eval_metrics(settings(log_passrate=True, eval_datasets=[own]), data)
    assert metrics["eval/math"] == 0.125
    assert metrics["eval/math-truncated_ratio"] == 0.125
    assert metrics["eval/math/response_len/mean"] == 7.0
    assert [metrics[f"eval/math-pass@{k}"] for k in (1, 2, 4)] == [0.125, 0.25, 0.5]
    assert (metrics["eval/plain"], metrics["eval/plain-pass@2"]) == (0.5, 1.0)


@pytest.mark.parametrize("reward", [None, {"acc": 1.0}, "right"])
def test_an_evaluation_reward_that_is_no_number_names_its_set(reward: Any) -> None:
    with pytest.raises(DataError, match=r"evaluation set math: reward 1 is .* --eval-reward-key"):
        eval_metrics(settings(), {"math": {"rewards": [1.0, reward]}})


def test_an_evaluation_without_rewards_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert eval_metrics(settings(), {"empty": {"rewards": []}, "full": {"rewards": [1]}}) == {"eval/full": 1.0}
    assert "eval/empty: no metrics" in caplog.text


@pytest.mark.parametrize("num_correct", range(7))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(num_correct: int) -> None:
    rewards = [1.0] * num_correct + [0.0] * (6 - num_correct)
    found = metric_utils.compute_pass_rate(rewards, 6)
    for k in (1, 2, 4):
        draws = list(itertools.combinations(rewards, k))
        assert found[f"pass@{k}"] == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert set(found) == {"pass@1", "pass@2", "pass@4"}


def test_pass_rate_needs_complete_groups_and_more_than_one_sample() -> None:
    assert metric_utils.compute_pass_rate([1.0, 0.0], 1) == {}
    with pytest.raises(AssertionError):
        metric_utils.compute_pass_rate([1.0] * 5, 2)


def test_statistics_and_compression() -> None:
    values = [3, 1, 2, 10]
    assert metric_utils.compute_statistics(values) == {
        "mean": statistics.mean(values),
        "median": 2.5,
        "max": 10.0,
        "min": 1.0,
    }
    assert metric_utils.compression_ratio("") == (float("inf"), 0.0)
    for algorithm in ("zlib", "gzip", "bz2", "lzma"):
        ratio, saved = metric_utils.compression_ratio("a" * 10_000, algorithm=algorithm)  # type: ignore[arg-type]
        assert ratio > 10
        assert saved == pytest.approx(100 * (1 - 1 / ratio))
    with pytest.raises(ValueError, match="rot13"):
        metric_utils.compression_ratio("a", algorithm="rot13")  # type: ignore[arg-type]


def test_repetition_needs_a_long_and_dull_text() -> None:
    assert not metric_utils.has_repetition("a" * 10_000)
    assert metric_utils.has_repetition("a" * 10_001)
    assert not metric_utils.has_repetition("".join(chr(33 + (i * i * 7919) % 9000) for i in range(20_000)))
