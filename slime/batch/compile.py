"""Groups of samples become columns (``slime.data.columns``)."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from slime.batch.rewards import group_keys, normalize_by_group
from slime.data.columns import COLUMNS, TrainData
from slime.data.sample import Sample, iter_samples
from slime.utils.errors import DataError

__all__ = ["compile_train_data"]


def compile_train_data(groups: Any, args: Namespace, *, post_process: Any = None, convert: Any = None) -> TrainData:
    """Columns over all samples of ``groups``, however nested.

    Args:
        post_process: user's ``f(args, samples) -> (raw_rewards, rewards)``, replaces group normalisation.
        convert: user's ``f(args, samples) -> columns``, replaces this function's own conversion.
    """
    samples = list(iter_samples(groups))
    if not samples:
        raise DataError("the rollout returned no sample: there is nothing to train on.")
    data = convert(args, samples) if convert is not None else _convert(samples, args, post_process)
    _complete(data, samples)
    return data


def _convert(samples: Sequence[Sample], args: Namespace, post_process: Any) -> TrainData:
    raw, rewards = (post_process or _relative_rewards)(args, samples)
    data: TrainData = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": list(rewards),
        "raw_reward": [_override(sample, reward) for sample, reward in zip(samples, raw, strict=True)],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": _rollout_ids(samples),
        "loss_masks": [_loss_mask(sample) for sample in samples],
        "weight_versions": [sample.weight_versions for sample in samples],
    }
    if any(sample.rollout_log_probs is not None for sample in samples):
        data["rollout_log_probs"] = [_log_probs(sample) for sample in samples]
    if any(sample.train_metadata is not None for sample in samples):
        data["metadata"] = [sample.train_metadata for sample in samples]
    if any("round_number" in (sample.metadata or {}) for sample in samples):
        data["round_number"] = [(sample.metadata or {}).get("round_number", 0) for sample in samples]
    return data


def _relative_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    raw = [_reward(sample, args) for sample in samples]
    if not args.rewards_normalization:
        return raw, raw
    groups = group_keys(samples, args.n_samples_per_prompt)
    return raw, normalize_by_group(raw, groups, divide_by_std=args.grpo_std_normalization)


def _reward(sample: Sample, args: Namespace) -> float:
    reward = sample.get_reward_value(args)
    if reward is None:
        raise DataError(f"sample {sample.index} has no reward: the reward function returned None, or never ran for it.")
    return float(reward)


def _override(sample: Sample, reward: float) -> float:
    return (sample.metadata or {}).get("raw_reward", reward)


def _rollout_ids(samples: Sequence[Sample]) -> list[int]:
    """Samples without an id get the smallest integers that no sample uses: each counts as a rollout of its own."""
    used = {sample.rollout_id for sample in samples}
    free = (number for number in range(2 * len(samples) + 1) if number not in used)
    return [next(free) if sample.rollout_id is None else sample.rollout_id for sample in samples]


def _loss_mask(sample: Sample) -> list[int]:
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    if len(mask) != sample.response_length:
        raise DataError(
            f"sample {sample.index}: loss_mask has {len(mask)} entries for a response of {sample.response_length} tokens."
        )
    return [0] * len(mask) if sample.remove_sample else mask


def _log_probs(sample: Sample) -> list[float]:
    if sample.rollout_log_probs is None:
        raise DataError(
            f"sample {sample.index} has no rollout_log_probs while others have: a custom generate function must set "
            "them for all samples or for none."
        )
    if len(sample.rollout_log_probs) != sample.response_length:
        raise DataError(
            f"sample {sample.index}: {len(sample.rollout_log_probs)} rollout_log_probs for a response of "
            f"{sample.response_length} tokens."
        )
    return sample.rollout_log_probs


def _complete(data: TrainData, samples: Sequence[Sample]) -> None:
    """Columns that follow from others, so that a custom conversion may leave them out."""
    missing = [name for name, column in COLUMNS.items() if column.required and name not in data]
    if missing:
        raise DataError(f"--custom-convert-samples-to-train-data-path: the result lacks {', '.join(missing)}.")
    data.setdefault("rollout_ids", list(range(len(data["tokens"]))))
    totals: dict[int, int] = defaultdict(int)
    for rollout_id, mask in zip(data["rollout_ids"], data["loss_masks"], strict=True):
        totals[rollout_id] += int(sum(mask))
    data.setdefault("rollout_mask_sums", [float(totals[rollout_id]) for rollout_id in data["rollout_ids"]])
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    for index, total, response in zip(
        data["sample_indices"], data["total_lengths"], data["response_lengths"], strict=True
    ):
        if not 0 < response < total:
            raise DataError(
                f"sample {index}: a response of {response} tokens in a sequence of {total} leaves nothing to train on; "
                "a response needs at least one token, and a prompt before it."
            )
