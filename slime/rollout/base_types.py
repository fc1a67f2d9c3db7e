"""The public border of the room: what rollout functions return, and which flags an ``args`` must have.

Called by the rollout manager and by the public functions of this room. Plugins return these records or plain values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from slime.config.groups import defaults_of
from slime.data.arguments import BatchSizeArgs, PromptDataArgs
from slime.data.sample import SampleGroup
from slime.hooks import name_of
from slime.rollout.arguments import EvalArgs, FilterArgs, GenerationArgs, RewardModelArgs
from slime.utils.errors import DataError

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn", "complete_args"]

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
