"""The sets of ids that response tokens were sampled from, as columns: of every trained sample, and of its tokens.

Called where samples become columns, for rollouts that cut the vocabulary (``slime.data.sampling_mask``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.data.columns import COLUMNS, SAMPLING_SETS, Column, TrainData
from slime.data.sample import Sample
from slime.utils.errors import DataError

__all__ = ["missing_column", "sampling_sets"]


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
            sets = [], [0] * (sample.response_length + 1)
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        if problem := _problem(response, mask, *sets):
            raise DataError(f"{where} {problem}")
        data[ids].append(sets[0])
        data[offsets].append(sets[1])
    return data


def _problem(tokens: Sequence[int], mask: torch.Tensor, ids: Any, offsets: Any) -> str | None:
    """What is wrong with the sets of a response, in words for its sample; None if nothing is.

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
    owner = torch.arange(len(tokens)).repeat_interleave(counts)
    is_token = ids.long() == torch.as_tensor(tokens, dtype=torch.int64)[owner]
    found = torch.zeros(len(tokens), dtype=torch.bool).index_fill_(0, owner[is_token], True)
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
