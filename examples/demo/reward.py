"""The demo's reward: 1 for the right number and nothing else, 0 otherwise.

--custom-rm-path examples/demo/reward.py:reward_func
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.data.sample import Sample

__all__ = ["reward_func"]

_END = "<|im_end|>"


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Exact match with the label. A response that was cut off has no end and cannot be right by accident."""
    answer = sample.response.strip()
    if not answer.endswith(_END):
        # The end token is not part of the text with --rollout-skip-special-tokens: then the status tells.
        return float(answer == sample.label and sample.status.value == "completed")
    return float(answer.removesuffix(_END).strip() == sample.label)
