"""Samples become columns: rewards, masks, rollout ids and everything optional that the samples carry.

Called once per rollout, before scheduling. The columns are those of ``slime.data.columns``; nothing here is a tensor
unless a sample brought one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from slime.batch.rewards import RewardArgs, group_keys, normalize_by_group, raw_rewards
from slime.data.columns import COLUMNS, Column, TrainData
from slime.data.routed_experts import compact_routed_experts
from slime.data.sample import Sample, iter_samples
from slime.utils.errors import DataError

__all__ = ["ConvertHook", "PostProcessHook", "compile_train_data", "fill_rollout_ids", "rollout_mask_sums"]

PostProcessHook: TypeAlias = Callable[[Any, list[Sample]], tuple[list[float], list[float]]]
"""``--custom-reward-post-process-path``: ``f(args, samples) -> (raw rewards, rewards)``."""

ConvertHook: TypeAlias = Callable[[Any, list[Sample]], TrainData]
"""``--custom-convert-samples-to-train-data-path``: ``f(args, samples) -> columns``."""


def compile_train_data(
    groups: Sequence[Any],
    *,
    rewards: RewardArgs,
    post_process: PostProcessHook | None = None,
    convert: ConvertHook | None = None,
    args: Any = None,
) -> TrainData:
    """Turn the samples of one rollout into training columns.

    Args:
        groups: samples, groups of samples, or any nesting of both; flattened in order.
        rewards: how rewards are normalised.
        post_process: replaces :mod:`slime.batch.rewards`.
        convert: replaces everything but the completion: ``rollout_ids``, ``rollout_mask_sums`` and ``total_lengths``
            are added when it leaves them out.
        args: handed to the two hooks, and used for nothing else.

    Returns:
        A dict of equally long lists.

    Raises:
        DataError: a sample that cannot be trained on, or a hook that returned something else than it must.
    """
    samples = list(iter_samples(groups))
    if not samples:
        raise DataError("the rollout has no samples to train on")
    data = _default_columns(samples, rewards, post_process, args) if convert is None else convert(args, samples)
    return _complete(data, len(samples) if convert is None else None)


def fill_rollout_ids(rollout_ids: Sequence[int | None]) -> list[int]:
    """Samples without a rollout id are rollouts of their own: they get the smallest ids that nobody else uses."""
    taken = {i for i in rollout_ids if i is not None}
    free = (i for i in range(len(rollout_ids)) if i not in taken)
    return [next(free) if i is None else i for i in rollout_ids]


def rollout_mask_sums(rollout_ids: Sequence[int], loss_masks: Sequence[Any]) -> list[int]:
    """Trained tokens of the whole rollout that each sample belongs to."""
    totals: dict[int, int] = {}
    for rollout_id, mask in zip(rollout_ids, loss_masks, strict=True):
        totals[rollout_id] = totals.get(rollout_id, 0) + int(sum(mask))
    return [totals[rollout_id] for rollout_id in rollout_ids]


def _default_columns(
    samples: list[Sample], rewards: RewardArgs, post_process: PostProcessHook | None, args: Any
) -> TrainData:
    raw, normalized = _rewards(samples, rewards, post_process, args)
    if any("raw_reward" in s.metadata for s in samples):
        raw = [s.metadata.get("raw_reward", value) for s, value in zip(samples, raw, strict=True)]
    masks = [_loss_mask(s) for s in samples]
    data: TrainData = {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": masks,
        "rewards": normalized,
        "raw_reward": raw,
        "truncated": [int(s.status == Sample.Status.TRUNCATED) for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_ids": fill_rollout_ids([s.rollout_id for s in samples]),
    }
    for column in COLUMNS.values():
        if column.sample_field:
            data.update(_optional_column(column, samples, masks))
    if any("round_number" in s.metadata for s in samples):
        data["round_number"] = [s.metadata.get("round_number") for s in samples]
    if any(_source(s) is not None for s in samples):
        data["source_names"] = [_source(s) or "unknown" for s in samples]
    return data


def _rewards(
    samples: list[Sample], settings: RewardArgs, post_process: PostProcessHook | None, args: Any
) -> tuple[list[float], list[float]]:
    if post_process is not None:
        raw, processed = post_process(args, samples)
        if not len(raw) == len(processed) == len(samples):
            raise DataError(
                f"--custom-reward-post-process-path returned {len(raw)} raw and {len(processed)} processed rewards for "
                f"{len(samples)} samples: it must return two lists with one entry per sample"
            )
        return list(raw), list(processed)
    raw = raw_rewards(samples, settings)
    if not settings.is_centered:
        return raw, list(raw)
    keys = group_keys(samples, settings.n_samples_per_prompt)
    return raw, normalize_by_group(raw, keys, divide_by_std=settings.is_scaled)


def _loss_mask(sample: Sample) -> list[int]:
    """The mask of a sample, checked. ``remove_sample`` masks everything: the sample only counts in its group's mean."""
    length, total = sample.response_length, len(sample.tokens)
    where = f"sample {sample.index} (group {sample.group_index})"
    if not 0 <= length < max(total, 1):
        raise DataError(
            f"{where} has {total} tokens with a response of {length}: it needs at least one prompt token, and tokens "
            "must hold the prompt and the response"
        )
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if len(mask) != length:
        raise DataError(f"{where} has a loss mask of {len(mask)} for a response of {length} tokens: they must be equal")
    for entry in mask:
        if entry not in (0, 1):
            raise DataError(f"{where} has a loss mask with {entry!r}: entries must be 0 or 1")
    return [0] * length if sample.remove_sample else [int(entry) for entry in mask]


def _optional_column(column: Column, samples: list[Sample], masks: list[list[int]]) -> Iterator[tuple[str, list[Any]]]:
    """The column, if any sample has it. What a sample lacks is made up only where that cannot change the training."""
    values = [getattr(s, column.sample_field) for s in samples]
    is_missing = [v is None or (column.form == "plain" and len(v) == 0) for v in values]
    if all(is_missing):
        return
    if column.axis == "inputs":
        values = _per_input(column, samples, values, masks)
    elif column.axis == "response":
        for i, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
            values[i] = _per_token(column, sample, values[i], mask)
    yield column.name, values


def _per_input(column: Column, samples: list[Sample], values: list[Any], masks: list[list[int]]) -> list[Any]:
    names = [f"sample {sample.index} (group {sample.group_index})" for sample in samples]
    for name, value, mask in zip(names, values, masks, strict=True):
        if value is None and any(mask):
            raise _missing(column, name)
    try:
        return compact_routed_experts(values, [len(sample.tokens) for sample in samples], names)
    except ValueError as error:
        raise DataError(str(error)) from None


def _missing(column: Column, where: str) -> DataError:
    return DataError(
        f"{where} has trained tokens but no {column.name}, while other samples of the rollout have them: every "
        "sample must carry them, or none; a custom generate function must pass them on, or mask the sample out "
        "(remove_sample)"
    )


def _per_token(column: Column, sample: Sample, value: Any, mask: list[int]) -> Any:
    where = f"sample {sample.index} (group {sample.group_index})"
    if value is None:
        if any(mask):
            raise _missing(column, where)
        return [0.0] * sample.response_length
    if len(value) != sample.response_length:
        raise DataError(f"{where} has {len(value)} {column.name} for a response of {sample.response_length} tokens")
    return value


def _source(sample: Sample) -> str | None:
    name = sample.__dict__.get("source") or sample.metadata.get("source_name")
    return None if name is None else str(name)


def _complete(data: TrainData, num_samples: int | None) -> TrainData:
    """Add derived columns, and check that every column of the table is there and equally long."""
    who = "the rollout" if num_samples is not None else "--custom-convert-samples-to-train-data-path"
    if not isinstance(data, dict) or "tokens" not in data or "loss_masks" not in data:
        raise DataError(f"{who} must give a dict with at least the columns tokens and loss_masks")
    n = len(data["tokens"])
    data.setdefault("rollout_ids", list(range(n)))
    data.setdefault("rollout_mask_sums", rollout_mask_sums(data["rollout_ids"], data["loss_masks"]))
    data.setdefault("total_lengths", [len(tokens) for tokens in data["tokens"]])
    needed = [c.name for c in COLUMNS.values() if c.required and c.per != "rank"]
    missing = [name for name in needed if name not in data]
    if missing:
        raise DataError(f"{who} lacks the columns {', '.join(missing)}; a batch needs {', '.join(needed)}")
    for name in data:
        if name in COLUMNS and len(data[name]) != n:
            raise DataError(f"{who} has {len(data[name])} entries in column {name} for {n} samples")
    return data
