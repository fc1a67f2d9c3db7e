"""Rewards of the distillation runs: none for training, exact match for the evaluation."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data.sample import Sample

__all__ = ["exact_match", "no_reward"]


def no_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Pure distillation: the teacher's log-probs are the only signal. For ``--opd-type megatron``."""
    return 0.0


def exact_match(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    return float(sample.response.strip() == sample.label)
