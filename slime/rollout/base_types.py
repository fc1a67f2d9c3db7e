"""What a rollout function returns. Called by the rollout manager; plugins return these or plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.data.sample import SampleGroup
from slime.hooks.load import name_of
from slime.utils.errors import DataError

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn"]


@dataclass
class RolloutFnTrainOutput:
    """A batch for training: one entry per prompt, and metrics to log."""

    samples: list[SampleGroup]
    metrics: dict[str, Any] | None = None


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
