"""The reward: 1 for a right first answer, 0.5 for a right second one, else 0. ``--custom-rm-path reward.py``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data import Sample


def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Compare the last line of the response with the label. A response that was cut off is wrong."""
    is_right = sample.response.strip().splitlines()[-1:] == [sample.label]
    if not is_right or sample.status is not Sample.Status.COMPLETED:
        return 0.0
    return 1.0 / int(sample.metadata.get("turns", 1))
