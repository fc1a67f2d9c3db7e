"""The demo's reward: 1 for the right number and nothing else, 0 otherwise.

--custom-rm-path examples/demo/reward.py:reward_func
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.data.sample import Sample

__all__ = ["reward_func"]


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Exact match with the label. A response that was cut off is wrong, also if its text so far is the label."""
    return float(sample.response.strip() == sample.label and sample.status.value == "completed")
