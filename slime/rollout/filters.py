"""Dynamic filters: the verdict, its use by the rollout, and the filters that come with slime."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.data.sample import SampleGroup, iter_samples
from slime.rollout.failures import is_given_up


@dataclass
class DynamicFilterOutput:
    """Verdict on a finished group.

    Attributes:
        keep: train on it.
        reason: of a rejection, counted in ``rollout/dynamic_filter/drop_<reason>``.
        keep_when_insufficient: keep it nevertheless if no more groups are coming than the batch needs.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group is dropped, with ``remaining_batch_size`` groups accepted or under way."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter. None keeps every group. Any result except a ``DynamicFilterOutput`` counts as a bool."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


class MetricGatherer:
    """Counts the reasons of dropped groups during one rollout."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._drops[reason] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}


# Dynamic filters that come with slime, for ``--dynamic-sampling-filter-path``.

# Rewards that differ by rounding errors only count as equal.
_MIN_STD = 1e-6


def check_reward_nonzero_std(args: Any, samples: SampleGroup, **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ: equal rewards have no group-relative advantage. A group of one is kept."""
    rewards = [float(s.get_reward_value(args)) for s in iter_samples(samples) if not is_given_up(s)]
    # All samples were given up: there is no reward to compare.
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="failed")
    if len(rewards) < 2 or statistics.stdev(rewards) > _MIN_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: SampleGroup, **kwargs: Any) -> DynamicFilterOutput:
    """The same, but such groups fill the batch if no better ones are coming."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
