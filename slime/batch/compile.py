"""Turns samples into columns: rewards, masks, rollout ids and the optional values of the samples.

Called once per rollout, before scheduling. The columns are those of ``slime.data.columns``. Values are those of the
samples, without copies. Only masks are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from slime.batch.rewards import RewardArgs, group_keys, normalize_by_group, raw_rewards
from slime.data.columns import COLUMNS, SAMPLING_SETS, Column, TrainData
from slime.data.engine_meta import compact_routed_experts, flat_list
from slime.data.sample import Sample, iter_samples
from slime.data.values import reward_number
from slime.utils.errors import DataError

PostProcessHook: TypeAlias = Callable[[Any, list[Sample]], tuple[list[float], list[float]]]
"""``--custom-reward-post-process-path``: ``f(args, samples) -> (raw rewards, rewards)``."""

_PostProcess: TypeAlias = Callable[[list[Sample]], tuple[list[float], list[float]]]

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
        groups: samples, groups of samples, or any nesting of both. They are flattened in order.
        rewards: how rewards are normalized.
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
    _check_rows(groups)
    for sample in samples:
        sample.metadata = sample.metadata or {}  # a user's rollout function may have set None
    if convert is not None:
        return _complete(convert(args, samples), None)
    post = None if post_process is None else partial(post_process, args)
    return _complete(_default_columns(samples, rewards, post), len(samples))


def fill_rollout_ids(rollout_ids: Sequence[int | None]) -> list[int]:
    """Fill in missing rollout ids. A sample without an id is a separate rollout and gets the smallest unused id."""
    taken = {i for i in rollout_ids if i is not None}
    # always enough: at most as many of these ids are taken as samples have an id
    free = (i for i in range(len(rollout_ids)) if i not in taken)
    return [next(free) if i is None else i for i in rollout_ids]


def rollout_mask_sums(rollout_ids: Sequence[int], loss_masks: Sequence[Any]) -> list[int]:
    """Trained tokens of the whole rollout that each sample belongs to."""
    totals: dict[int, int] = {}
    for rollout_id, mask in zip(rollout_ids, loss_masks, strict=True):
        total = mask.sum() if isinstance(mask, torch.Tensor) else sum(mask)
        totals[rollout_id] = totals.get(rollout_id, 0) + int(total)
    return [totals[rollout_id] for rollout_id in rollout_ids]


def _check_rows(node: Any, depth: int = 0) -> None:
    """Check that all rows of one execution, which are a list within a group, have the same rollout id."""
    if isinstance(node, Sample):
        return
    # depth 0 is the rollout, 1 a group, 2 the rows of one execution
    if depth < 2 or not all(isinstance(item, Sample) for item in node):
        for item in node:
            _check_rows(item, depth + 1)
        return
    ids = {sample.rollout_id for sample in node}
    # rows with different ids would each weigh as much in the loss as a whole rollout
    if len(node) > 1 and (None in ids or len(ids) > 1):
        raise DataError(
            f"the {len(node)} rows that one execution made of sample {node[0].index} (group {node[0].group_index}) "
            f"have the rollout ids {[s.rollout_id for s in node]}: a rollout function must give them the same one"
        )


def _default_columns(samples: list[Sample], rewards: RewardArgs, post_process: _PostProcess | None) -> TrainData:
    raw, normalized = _rewards(samples, rewards, post_process)
    # for logs only: the rewards that train are already computed
    if any("raw_reward" in s.metadata for s in samples):
        raw = [_logged_reward(s, value) for s, value in zip(samples, raw, strict=True)]
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
    data.update(sampling_sets(samples, masks))
    if any("round_number" in s.metadata for s in samples):
        data["round_number"] = [s.metadata.get("round_number") for s in samples]
    if any(_source(s) is not None for s in samples):
        data["source_names"] = [_source(s) or "unknown" for s in samples]
    return data


def _rewards(
    samples: list[Sample], settings: RewardArgs, post_process: _PostProcess | None
) -> tuple[list[float], list[float]]:
    if post_process is not None:
        raw, processed = post_process(samples)
        if not len(raw) == len(processed) == len(samples):
            raise DataError(
                f"--custom-reward-post-process-path returned {len(raw)} raw and {len(processed)} processed rewards for "
                f"{len(samples)} samples: it must return two lists with one entry per sample"
            )
        return _checked(raw, "raw"), _checked(processed, "processed")
    raw = raw_rewards(samples, settings)
    if not settings.is_centered:
        return raw, list(raw)
    # a failed sample has no part in the mean and the deviation of its group: the quality of its response is unknown
    keys = group_keys(samples, settings.n_samples_per_prompt)
    scored = [i for i, s in enumerate(samples) if not (s.remove_sample and s.status is Sample.Status.FAILED)]
    processed = [0.0] * len(samples)
    relative = normalize_by_group([raw[i] for i in scored], [keys[i] for i in scored], divide_by_std=settings.is_scaled)
    for i, value in zip(scored, relative, strict=True):
        processed[i] = value
    return raw, processed


def _checked(values: Sequence[Any], name: str) -> list[Any]:
    try:
        return [reward_number(value, f"{name} reward {position}") for position, value in enumerate(values)]
    except ValueError as error:
        raise DataError(f"--custom-reward-post-process-path returned an invalid reward: {error}") from None


def _logged_reward(sample: Sample, raw: float) -> float:
    """The ``raw_reward`` that a user's code or the data set put into the metadata, else ``raw``."""
    value = sample.metadata.get("raw_reward")
    try:
        return raw if value is None or isinstance(value, dict) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"sample {sample.index} (group {sample.group_index}) has metadata raw_reward {value!r}: it is logged in "
            "the place of the reward, and must be a number"
        ) from None


def _loss_mask(sample: Sample) -> torch.Tensor:
    """The checked mask of a sample, int8 ``[R]``: zeros with ``remove_sample``, ones if the sample has none."""
    length, total = sample.response_length, len(sample.tokens)
    where = f"sample {sample.index} (group {sample.group_index})"
    if not 0 <= length < max(total, 1):
        raise DataError(
            f"{where} has {total} tokens with a response of {length}: it needs at least one prompt token, and tokens "
            "must hold the prompt and the response"
        )
    mask = sample.loss_mask
    if mask is not None and len(mask) != length:
        raise DataError(f"{where} has a loss mask of {len(mask)} for a response of {length} tokens: they must be equal")
    # users' functions may set lists, arrays or tensors
    entries = [] if mask is None else flat_list(mask)
    for entry in set(entries) - {0, 1}:
        raise DataError(f"{where} has a loss mask with {entry!r}: entries must be 0 or 1")
    # the reward of a removed sample still counts in the mean of its group, unless the sample failed
    if sample.remove_sample:
        return torch.zeros(length, dtype=torch.int8)
    return torch.ones(length, dtype=torch.int8) if mask is None else torch.tensor(mask, dtype=torch.int8)


def _optional_column(
    column: Column, samples: list[Sample], masks: list[torch.Tensor]
) -> Iterator[tuple[str, list[Any]]]:
    """The column, if any sample has it. Raises DataError for a trained sample without it."""
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


def _per_input(column: Column, samples: list[Sample], values: list[Any], masks: list[torch.Tensor]) -> list[Any]:
    names = [f"sample {sample.index} (group {sample.group_index})" for sample in samples]
    for name, value, mask in zip(names, values, masks, strict=True):
        # a missing value may be filled in only if no token of the sample is trained
        if value is None and mask.any():
            raise missing_column(column, name)
    lengths = [len(sample.tokens) for sample in samples]
    # rows after the last trained token cannot change the loss, so an engine may leave them out
    needed = [_last_trained(length, mask) for length, mask in zip(lengths, masks, strict=True)]
    try:
        return compact_routed_experts(values, lengths, needed, names)
    except ValueError as error:
        raise DataError(str(error)) from None


def _last_trained(num_tokens: int, mask: torch.Tensor) -> int:
    """Position of the last trained token, which is also the number of inputs before it. It is 0 without one."""
    trained = mask.nonzero()
    return num_tokens - len(mask) + int(trained[-1]) if len(trained) else 0


def _per_token(column: Column, sample: Sample, value: Any, mask: torch.Tensor) -> Any:
    where = f"sample {sample.index} (group {sample.group_index})"
    if value is None:
        if mask.any():
            raise missing_column(column, where)
        return [0.0] * sample.response_length  # never read: the whole sample is masked out
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
    # a user's conversion may leave out columns that follow from others
    data.setdefault("rollout_ids", list(range(n)))
    data.setdefault("rollout_mask_sums", rollout_mask_sums(data["rollout_ids"], data["loss_masks"]))
    data.setdefault("total_lengths", [len(tokens) for tokens in data["tokens"]])
    # columns of a rank do not exist before the batch is cut
    needed = [c.name for c in COLUMNS.values() if c.required and c.per != "rank"]
    missing = [name for name in needed if name not in data]
    if missing:
        raise DataError(f"{who} lacks the columns {', '.join(missing)}; a batch needs {', '.join(needed)}")
    for name in data:
        if name in COLUMNS and len(data[name]) != n:
            raise DataError(f"{who} has {len(data[name])} entries in column {name} for {n} samples")
    return data


def sampling_sets(samples: list[Sample], masks: list[torch.Tensor]) -> TrainData:
    """The columns, if any sample has them.

    Raises:
        DataError: a trained sample without sets, or sets that are not those of its tokens.
    """
    ids, offsets = SAMPLING_SETS
    if all(sample.rollout_top_p_token_offsets is None for sample in samples):
        return {}
    data: TrainData = {ids: [], offsets: []}
    for sample, mask in zip(samples, masks, strict=True):
        where = f"sample {sample.index} (group {sample.group_index})"
        sets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        if sets[1] is None:
            if mask.any():
                raise missing_column(COLUMNS[offsets], where)
            # masked out: rows without ids keep the whole vocabulary
            sets = [], [0] * (sample.response_length + 1)
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        if problem := _problem(response, mask, *sets):
            raise DataError(f"{where} {problem}")
        data[ids].append(sets[0])
        data[offsets].append(sets[1])
    return data


def _problem(tokens: Sequence[int], mask: torch.Tensor, ids: Any, offsets: Any) -> str | None:
    """The error in the sets of a response, as the end of a sentence about its sample. None if they are right.

    Args:
        tokens: the response, ``[R]``.
        mask: ``[R]``, 1 = trained.
    """
    ids, offsets = torch.as_tensor(ids), torch.as_tensor(offsets)
    if len(offsets) != len(tokens) + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(ids):
        last = int(offsets[-1]) if len(offsets) else 0
        return (
            f"has {len(offsets)} offsets up to {last} and {len(ids)} ids of sampling sets for a response of "
            f"{len(tokens)} tokens: it needs one offset more than tokens, and the last one is the number of ids"
        )
    counts = offsets.long().diff()
    if len(counts) and int(counts.min()) < 0:
        return "has offsets of sampling sets that decrease"
    # position in the response that each id belongs to
    owner = torch.arange(len(tokens)).repeat_interleave(counts)
    is_token = ids.long() == torch.as_tensor(tokens, dtype=torch.int64)[owner]
    found = torch.zeros(len(tokens), dtype=torch.bool).index_fill_(0, owner[is_token], True)
    # log-probs always keep the target: a set without it would give wrong values and no error
    lost = (mask.bool() & ~found).nonzero()
    if not len(lost):
        return None
    where = int(lost[0])
    return (
        f"was trained to sample token {int(tokens[where])} at response position {where} from {int(counts[where])} ids "
        "that it does not belong to: sets and tokens are not of one request"
    )


def missing_column(column: Column, where: str) -> DataError:
    """The error of a trained sample that lacks what others of its rollout have."""
    return DataError(
        f"{where} has trained tokens but no {column.name}, while other samples of the rollout have them: every "
        "sample must carry them, or none; a custom generate function must pass them on, or mask the sample out "
        "(remove_sample)"
    )
