"""Rewards relative to their group (GRPO, eq. 3): centred on the group's mean, divided by its standard deviation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.data.sample import Sample

__all__ = ["group_keys", "normalize_by_group"]

_EPSILON = 1e-6


def group_keys(samples: Sequence[Sample], group_size: int) -> list[int]:
    """The group of each sample: its ``group_index``, or its position when no sample carries one."""
    if all(sample.group_index is None for sample in samples):
        return [position // group_size for position in range(len(samples))]
    return [-1 if sample.group_index is None else sample.group_index for sample in samples]


def normalize_by_group(rewards: Sequence[float], groups: Sequence[int], *, divide_by_std: bool) -> list[float]:
    """(r - mean) / (std + 1e-6) within each group, std unbiased. A group of one, or of equal rewards, gives zeros."""
    result = torch.zeros(len(rewards), dtype=torch.float64)
    values = torch.tensor(rewards, dtype=torch.float64)
    keys = torch.tensor(groups)
    for key in keys.unique():
        members = keys == key
        centred = values[members] - values[members].mean()
        if divide_by_std:
            deviation = values[members].std() if int(members.sum()) > 1 else torch.tensor(0.0)
            centred = centred / (deviation + _EPSILON)
        result[members] = centred
    return result.tolist()
