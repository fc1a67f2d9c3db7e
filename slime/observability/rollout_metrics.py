"""Metrics of a rollout and of an evaluation: lengths, rewards, truncation, speed.

Called by the rollout manager, which sends the metrics to the driver and its trackers. A user's function may replace all
of them. Reads samples only.
"""

from __future__ import annotations

import logging
import statistics
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.algorithms import find_estimator
from slime.observability.logging_utils import collecting
from slime.observability.metric_utils import (
    compute_pass_rate,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
    request_metrics,
)
from slime.utils.errors import ConfigError, DataError, reported
from slime.utils.prompt_sources import parse_sources

if TYPE_CHECKING:
    from slime.data.sample import Sample

logger = logging.getLogger(__name__)

_QUARTERS = (25, 50, 75, 100)
# Metrics of rollout functions, summed as wasted tokens.
_WASTED = ("dropped_tokens", "discarded_tokens", "stale_tokens")


def log_rollout_data(
    rollout_id: int,
    args: Namespace,
    samples: Sequence[Sample],
    rollout_extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
    custom_log_func: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """All metrics of one rollout, with their prefixes.

    Args:
        rollout_extra_metrics: metrics that the rollout function returned, with their prefixes.
        rollout_time: seconds from the request to the last sample.
        custom_log_func: ``--custom-rollout-log-function-path``. Metrics that it passes to ``logging_utils.log`` are
            in the result. If it returns a true value, the result holds nothing else.
    """
    given = (rollout_id, args, samples, rollout_extra_metrics, rollout_time)
    is_done, logged = _log_by_user("--custom-rollout-log-function-path", custom_log_func, *given)
    if is_done:
        return logged
    _check_reward_category(args.log_reward_category, samples)
    # computed once, because each length is a sum over all tokens
    trained = [sample.effective_response_length for sample in samples]
    metrics = dict(rollout_extra_metrics or {})
    metrics |= dict_add_prefix(compute_metrics_from_samples(args, samples, trained), "rollout/")
    # only if needed: a reward of a user may lack the key
    needs_raw = args.log_correct_samples or args.log_passrate
    raw = [_raw_reward(args.reward_key, sample) for sample in samples] if needs_raw else []
    if args.log_correct_samples:
        metrics |= dict_add_prefix(_correct_samples(samples, raw, args.rollout_max_response_len), "rollout/")
    metrics |= dict_add_prefix(_weight_version_lag(rollout_id, samples), "rollout/weight_version_lag/")
    metrics |= dict_add_prefix(_token_counts(samples, trained, metrics), "rollout/")
    metrics |= _rewards_by_source(vars(args).get("prompt_data") or "", args.reward_key, samples)
    if args.log_multi_turn and samples:
        metrics |= dict_add_prefix(_multi_turn(samples, trained, args.rollout_max_response_len), "multi_turn/")
    if args.log_passrate:
        metrics |= dict_add_prefix(_pass_rate(samples, raw, args.n_samples_per_prompt), "passrate/")
    metrics |= dict_add_prefix(compute_perf_metrics_from_samples(args, samples, rollout_time, trained), "perf/")
    # Metrics of the user replace those of slime.
    return metrics | logged


def log_eval_rollout_data(
    rollout_id: int,
    args: Namespace,
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: Mapping[str, Any] | None = None,
    custom_log_func: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """All metrics of an evaluation, with their prefixes. :func:`eval_metrics` describes ``data``."""
    given = (rollout_id, args, data, extra_metrics)
    is_done, logged = _log_by_user("--custom-eval-rollout-log-function-path", custom_log_func, *given)
    if is_done:
        return logged
    return eval_metrics(args, data) | dict(extra_metrics or {}) | logged


def compute_metrics_from_samples(
    args: Namespace, samples: Sequence[Sample], trained: Sequence[int] | None = None
) -> dict[str, float]:
    """Metrics of the samples of one rollout or one evaluation set, without prefix. Empty for no samples.

    Args:
        trained: their ``effective_response_length``, for callers that have them.
    """
    if not samples:
        return {}
    lengths = trained or [sample.effective_response_length for sample in samples]
    metrics = dict_add_prefix(compute_statistics(lengths), "response_len/")
    if not find_estimator(args.advantage_estimator).needs_critic:  # only then are siblings compared
        keys = (args.reward_key, vars(args).get("eval_reward_key"))
        metrics |= _zero_std(samples, [_number_of(sample.reward, keys) for sample in samples])
    metrics |= _speculation(samples)
    metrics |= _prefix_cache(samples)
    metrics |= _reward_categories(args.log_reward_category, samples)
    metrics |= _compute_top_p_kept_vocab_metrics(args, samples)
    metrics["repetition_frac"] = _share(has_repetition(sample.response) for sample in samples)
    metrics["truncated_ratio"] = _share(sample.status.value == "truncated" for sample in samples)
    if ungraded := sum("grading_stopped" in (sample.metadata or {}) for sample in samples):
        metrics["ungraded_answers"] = ungraded
    return metrics


def compute_perf_metrics_from_samples(
    args: Namespace, samples: Sequence[Sample], rollout_time: float, trained: Sequence[int] | None = None
) -> dict[str, float]:
    """Speed of one rollout that took ``rollout_time`` seconds, without prefix.

    Args:
        trained: the samples' ``effective_response_length``, for callers that have them.
    """
    metrics = {"rollout_time": float(rollout_time)}
    # A replayed rollout may take 0 seconds.
    if not samples or rollout_time <= 0:
        return metrics
    waits = [sample.non_generation_time for sample in samples]
    if max(waits) > 0:
        metrics |= dict_add_prefix(compute_statistics(waits), "non_generation_time/")
    metrics |= request_metrics(samples)
    lengths = [sample.response_length for sample in samples]
    num_gpus = args.rollout_num_gpus
    metrics |= _speed(num_gpus, samples, rollout_time, lengths, "tokens_per_gpu", "longest_sample")
    trained = trained or [sample.effective_response_length for sample in samples]
    name = "longest_effective_sample"
    return metrics | _speed(num_gpus, samples, rollout_time, trained, "effective_tokens_per_gpu", name)


def eval_metrics(args: Namespace, data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """``eval/<dataset>...`` from the result of an evaluation function.

    Args:
        data: ``{dataset: {"rewards": [...], "truncated"?: [...], "samples"?: [...]}}``, lists over samples.
    """
    metrics: dict[str, float] = {}
    own_group_size = {dataset.name: dataset.n_samples_per_eval_prompt for dataset in args.eval_datasets}
    for name, result in data.items():
        rewards = _numbers(name, result["rewards"])
        if not rewards:
            logger.warning("eval/%s: no metrics, because the evaluation function returned no rewards", name)
            continue
        metrics[f"eval/{name}"] = statistics.fmean(rewards)
        samples = result.get("samples")
        if samples:
            metrics |= dict_add_prefix(compute_metrics_from_samples(args, samples), f"eval/{name}/")
        truncated = result.get("truncated")
        if truncated:
            metrics[f"eval/{name}-truncated_ratio"] = _share(truncated)
        if args.log_passrate:
            group_size = own_group_size.get(name) or args.n_samples_per_eval_prompt
            # A set that ended early, or fan-out, leaves incomplete groups.
            if len(rewards) % group_size:
                logger.warning("eval/%s: no pass@k, %d rewards are no groups of %d", name, len(rewards), group_size)
                continue
            metrics |= dict_add_prefix(compute_pass_rate(rewards, group_size), f"eval/{name}-")
    return metrics


def _numbers(name: str, rewards: Sequence[Any]) -> list[float]:
    numbers: list[float] = []
    for position, reward in enumerate(rewards):
        try:
            numbers.append(float(reward))
        except (TypeError, ValueError):
            raise DataError(
                f"evaluation set {name}: reward {position} is {reward!r}, not a number: if rewards are dicts, "
                "name the key with --eval-reward-key, or return numbers"
            ) from None
    return numbers


def _log_by_user(flag: str, function: Callable[..., Any] | None, *given: Any) -> tuple[bool, dict[str, Any]]:
    """Whether nothing else is to be logged, and the metrics that a user's log function passed on.

    Its error is logged: the metrics of slime are there in any case.
    """
    is_done, failed = False, "%s failed: its metrics are missing, those of slime are logged"
    with collecting() as logged, reported(lambda _: logger.exception(failed, flag)):
        is_done = function is not None and bool(function(*given))
    return is_done, logged


def _share(flags: Any) -> float:
    return statistics.fmean(float(bool(flag)) for flag in flags)


def _zero_std(samples: Sequence[Sample], rewards: Sequence[Any]) -> dict[str, float]:
    """Prompt groups without a signal (all rewards are equal), counted by that reward."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        if isinstance(reward, int | float):
            groups[sample.group_index].append(float(reward))
    counts = Counter(round(rewards[0], 1) for rewards in groups.values() if len(set(rewards)) == 1)
    return {f"zero_std/count_{reward}": float(count) for reward, count in counts.items()}


def _number_of(reward: Any, keys: Sequence[str | None]) -> Any:
    """The reward, or the first of the entries ``keys`` that a reward dict has. An evaluation may return others."""
    return next((reward[key] for key in keys if key in reward), None) if isinstance(reward, dict) else reward


def _raw_reward(key: str | None, sample: Sample) -> Any:
    """The grader's reward, before a user's shaping."""
    reward = sample.metadata.get("raw_reward") if sample.metadata else None
    if reward is not None:
        return reward
    return sample.reward[key] if key else sample.reward


def _rewards_by_source(prompt_data: str, key: str | None, samples: Sequence[Sample]) -> dict[str, float]:
    """``rollout/source/<name>/raw_reward`` of each source of ``--prompt-data`` that has a name."""
    names = {source.name for source in parse_sources(prompt_data)} - {""}
    rewards: dict[str, list[Any]] = defaultdict(list)
    for sample in samples if names else ():
        if (name := (sample.metadata or {}).get("source_name")) in names:
            rewards[name].append(_raw_reward(key, sample))
    means = {name: mean_reward(values) for name, values in rewards.items()}
    return {f"rollout/source/{name}/raw_reward": value for name, mean in means.items() for value in mean.values()}


def mean_reward(rewards: Sequence[Any]) -> dict[str, float]:
    """``rollout/raw_reward`` of a rollout before it is trained on. Empty if a reward is not a number."""
    if not rewards or not all(isinstance(reward, int | float) for reward in rewards):
        return {}
    return {"rollout/raw_reward": statistics.fmean(rewards)}


def _correct_samples(samples: Sequence[Sample], raw: Sequence[Any], max_length: int) -> dict[str, float]:
    """Lengths of the responses with a reward of exactly 1.

    ``correct_length/p50`` is the share of them that is longer than a quarter and at most half of
    --rollout-max-response-len.
    """
    lengths = [sample.response_length for sample, reward in zip(samples, raw, strict=True) if reward == 1]
    if not lengths:
        return {}
    shares = [100 * length / max_length for length in lengths]
    metrics = {
        # An empty response counts in the first quarter.
        f"correct_length/p{end}": _share(end - 25 < share <= end or (end == 25 and share <= 0) for share in shares)
        for end in _QUARTERS
    }
    return metrics | {"correct_response_lengths": statistics.fmean(lengths)}


def _weight_version_lag(rollout_id: int, samples: Sequence[Sample]) -> dict[str, float]:
    """Age of the oldest weights that wrote into a sample, in rollouts: 0 for the newest possible version."""
    oldest = [
        min(int(version) for version in sample.weight_versions)
        for sample in samples
        # Users' generate functions may note other texts than numbers.
        if sample.weight_versions and all(str(version).isdecimal() for version in sample.weight_versions)
    ]
    lags = [float(rollout_id - version) for version in oldest]
    return {"mean": statistics.fmean(lags), "max": max(lags)} if lags else {}


def _token_counts(samples: Sequence[Sample], trained: Sequence[int], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Generated tokens of this rollout, and the share of them without loss."""
    generated = sum(sample.response_length for sample in samples)
    if not generated:
        return {}
    # A removed sample has no part in the loss, whatever its mask is.
    kept = sum(length for sample, length in zip(samples, trained, strict=True) if not sample.remove_sample)
    return {
        "response_tokens": float(generated),
        "masked_share": 1.0 - kept / generated,
        "wasted_tokens": float(sum(metrics.get(f"rollout/{name}", 0.0) for name in _WASTED)),
    }


def _multi_turn(samples: Sequence[Sample], trained: Sequence[int], max_length: int) -> dict[str, float]:
    """Response lengths with and without the tokens of environments, and numbers of turns."""
    lengths = [sample.response_length for sample in samples]
    metrics = _extremes("raw_response_length/response_length", lengths)
    clipped = [length >= max_length for length in lengths]
    metrics["raw_response_length/response_length_clip_ratio"] = _share(clipped)
    metrics |= _extremes("wo_obs_response_length/response_length", trained)
    rounds = [sample.metadata["round_number"] for sample in samples if "round_number" in (sample.metadata or {})]
    return metrics | (_extremes("multi_turn_metric/round_number", rounds) if rounds else {})


def _extremes(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_mean": statistics.fmean(values),
        f"{name}_max": float(max(values)),
        f"{name}_min": float(min(values)),
    }


def _pass_rate(samples: Sequence[Sample], raw: Sequence[Any], size: int) -> dict[str, float]:
    """pass@k of the training prompts with a complete group."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, raw, strict=True):
        groups[sample.group_index].append(reward)
    # Fan-out and dropped samples make a group incomplete.
    whole = [reward for rewards in groups.values() if len(rewards) == size for reward in rewards]
    return compute_pass_rate(whole, size) if whole else {}


def _speculation(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of speculative decoding. Its counters are 0 without it."""
    if not any(sample.spec_info.spec_verify_ct for sample in samples):
        return {}
    return {
        "spec_accept_rate": statistics.fmean(sample.spec_info.spec_accept_rate for sample in samples),
        "spec_accept_length": statistics.fmean(sample.spec_info.spec_accept_length for sample in samples),
    }


def _prefix_cache(samples: Sequence[Sample]) -> dict[str, float]:
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompts = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    return {
        "prefix_cache_hit_rate": cached / prompts if prompts else 0.0,
        "avg_cached_tokens_per_sample": cached / len(samples),
    }


def _reward_categories(key: str | None, samples: Sequence[Sample]) -> dict[str, float]:
    if key is None:
        return {}
    counts = Counter(
        sample.reward[key] for sample in samples if isinstance(sample.reward, dict) and key in sample.reward
    )
    return {f"error_cat/{value}": count / len(samples) for value, count in counts.items()}


def _check_reward_category(key: str | None, samples: Sequence[Sample]) -> None:
    if key is not None and samples and not _reward_categories(key, samples):
        raise ConfigError(
            f"--log-reward-category {key}: no reward of the rollout is a dict with that key; the first is "
            f"{samples[0].reward!r}."
        )


def _compute_top_p_kept_vocab_metrics(args: Namespace, all_samples: Sequence[Sample]) -> dict[str, float]:
    """Mean number of vocabulary entries that nucleus sampling kept, over trained response tokens."""
    sizes: list[int] = []
    for sample in all_samples:
        offsets = sample.rollout_top_p_token_offsets
        if offsets is None or sample.remove_sample:
            continue
        # converted at once: indexing a tensor item by item takes many times as long
        ends = np.asarray(offsets).tolist()
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        spans = zip(ends[:-1], ends[1:], mask, strict=True)
        sizes += [end - start for start, end, is_trained in spans if is_trained]
    return {"top_p_kept_vocab_per_token": statistics.fmean(sizes)} if sizes else {}


def _speed(
    num_gpus: int | None,
    samples: Sequence[Sample],
    rollout_time: float,
    lengths: Sequence[int],
    total: str,
    longest: str,
) -> dict[str, float]:
    """Tokens per second of all engines, and of the longest sample, which every rollout waits for."""
    peak = max(lengths)
    metrics: dict[str, float] = {}
    if num_gpus:
        metrics[f"{total}_per_sec"] = sum(lengths) / rollout_time / num_gpus
    metrics[f"{longest}_tokens_per_sec"] = peak / rollout_time
    waits = [s.non_generation_time for s, length in zip(samples, lengths, strict=True) if length == peak]
    if max(waits) > 0:
        wait = statistics.fmean(waits)
        metrics[f"{longest}_non_generation_time"] = wait
        if rollout_time > wait:
            metrics[f"{longest}_tokens_per_sec_without_non_generation"] = peak / (rollout_time - wait)
    return metrics
