"""The public border of the room: the results of rollout functions and dynamic filters, and the flags of an ``args``.

Called by the rollout manager and by the public functions of this room. Plugins return these records or plain values.
The last functions are the dynamic filters that come with slime, for ``--dynamic-sampling-filter-path``.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from slime.config.groups import defaults_of
from slime.data.arguments import BatchSizeArgs, PromptDataArgs
from slime.data.sample import SampleGroup, iter_samples
from slime.hooks import name_of
from slime.rollout.arguments import EvalArgs, FilterArgs, GenerationArgs, RewardModelArgs
from slime.rollout.failures import is_given_up
from slime.utils.errors import DataError

Args = TypeVar("Args")

_DEFAULTS: dict[str, Any] = {
    **defaults_of((GenerationArgs, RewardModelArgs, FilterArgs, EvalArgs, PromptDataArgs, BatchSizeArgs)),
    # flags and facts of other rooms
    "deterministic_mode": False,
    "router_policy": None,
    "sglang_dp_size": None,
    "sglang_enable_deterministic_inference": False,
    "sglang_model_routers": None,
    "update_weights_interval": 1,
    "use_fault_tolerance": False,
    "use_rollout_routing_replay": False,
}


@dataclass
class RolloutFnTrainOutput:
    """A training batch with one entry per prompt, and metrics to log. It reads like the list of its samples."""

    samples: list[SampleGroup]
    metrics: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[SampleGroup]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]


@dataclass
class RolloutFnEvalOutput:
    """Per dataset ``{"rewards": [...], "truncated": [...], "samples": [...]}``, equally long, and metrics to log."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function and wrap a plain result.

    Raises:
        DataError: the function returned nothing.
    """
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    if output is None:
        flag = "--eval-function-path" if evaluation else "--rollout-function-path"
        raise DataError(f"{flag}: {name_of(fn)} returned None; it must return samples, or a RolloutFn...Output")
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


def complete_args(args: Args) -> Args:
    """Add the flags that a handmade namespace lacks, with their declared defaults. Returns ``args``.

    Public functions of this room call it once. The code inside reads ``args.<flag>`` without a default.
    """
    if vars(args).keys() >= _DEFAULTS.keys():  # called several times per sample
        return args
    for name, default in _DEFAULTS.items():
        if not hasattr(args, name):
            # In place, not in a copy: hooks may count or remember in the object that the caller holds.
            setattr(args, name, copy.copy(default))
    return args


class Count:
    """A part of the work of this process that is under way, for the console of the driver."""

    _open: ClassVar[list[Count]] = []

    def __init__(self, total: int, unit: str) -> None:
        self._done, self._total, self._unit = 0, total, unit
        self._open.append(self)

    def add(self, number: int = 1) -> None:
        self._done += number

    def close(self) -> None:
        self._open.remove(self)

    @classmethod
    def under_way(cls) -> str:
        """``9/16 groups``. Empty if nothing is counted."""
        return ", ".join(f"{one._done}/{one._total} {one._unit}" for one in list(cls._open))


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
