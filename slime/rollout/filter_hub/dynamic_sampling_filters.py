"""Dynamic filters that come with slime, for ``--dynamic-sampling-filter-path``."""

from __future__ import annotations

import statistics
from typing import Any

from slime.data.sample import SampleGroup, iter_samples
from slime.rollout.failures import is_given_up
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"]

_MIN_STD = 1e-6


def check_reward_nonzero_std(args: Any, samples: SampleGroup, **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ: equal rewards have no group-relative advantage. A group of one is kept."""
    rewards = [float(s.get_reward_value(args)) for s in iter_samples(samples) if not is_given_up(s)]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="failed")
    if len(rewards) < 2 or statistics.stdev(rewards) > _MIN_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: SampleGroup, **kwargs: Any) -> DynamicFilterOutput:
    """The same, but such groups fill the batch when nothing better is coming."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
