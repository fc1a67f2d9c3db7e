"""The reward of problems with a picture: whether the last answer is the label.

--custom-rm-path examples.geo3k_vlm.reward_geo3k.reward_func
"""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from slime.data.sample import Sample
from slime.rollout.rm_hub.math_utils import grade_answer_verl

__all__ = ["is_right", "reward_func"]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def is_right(response: str, label: Any) -> bool:
    """Whether ``\\boxed{..}``, or without a box the last number, is the label. Comparing formulas takes time."""
    # The grader reads boxes only.
    if "\\boxed" not in response:
        numbers = _NUMBER.findall(response)
        response = f"\\boxed{{{numbers[-1]}}}" if numbers else ""
    return bool(response) and grade_answer_verl(response, label)


def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """1 for a right answer, else 0. Not async: it runs in a thread."""
    return float(is_right(sample.response, sample.label))
