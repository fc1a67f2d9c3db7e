"""Generate function that returns several samples per execution, and a matching reward normalization.

For tests of fan-out, which name the functions by path: ``slime.compat.fanout_test_helpers.compact_generate``.
"""

from __future__ import annotations

import contextlib
import copy
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from slime.data.sample import Sample
from slime.rollout.sglang_rollout import generate

__all__ = ["COUNTER_FILE_ENV", "MAX_FANOUT", "compact_generate", "grpo_normalize_by_group_index"]

MAX_FANOUT = 3
COUNTER_FILE_ENV = "SLIME_FANOUT_TEST_COUNTER_FILE"


async def compact_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Return one generation as ``1 + index % 3`` samples. Appends the index to the file of ``COUNTER_FILE_ENV``."""
    sample = await generate(args, sample, sampling_params)
    index = sample.index or 0
    if path := os.environ.get(COUNTER_FILE_ENV):
        with contextlib.suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")
    copies = [copy.deepcopy(sample) for _ in range(1 + index % MAX_FANOUT)]
    for one in copies:
        one.rollout_id = sample.index  # samples of one execution share its id
    return copies


def grpo_normalize_by_group_index(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards minus the mean of their group). All samples have the same weight."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    normalized = list(raw)
    for group in {sample.group_index for sample in samples}:
        members = [i for i, sample in enumerate(samples) if sample.group_index == group]
        values = torch.tensor([raw[i] for i in members])
        centered = values - values.mean()
        if args.grpo_std_normalization and len(members) > 1:  # std() of one value is NaN
            centered = centered / (values.std() + 1e-6)
        for i, value in zip(members, centered.tolist(), strict=True):
            normalized[i] = value
    return raw, normalized
