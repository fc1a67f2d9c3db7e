"""Users' rewards: ``--custom-rm-path`` in every form that is accepted.

f(args, sample)                      one sample; under --group-rm it receives the list
f(args, samples)                     a batch, recognised by the parameter's name
f(prompts, responses[, labels])      a batch of plain values
class with compute_reward(...)       made once per process
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slime.data.sample import Sample
from slime.hooks.load import load_function
from slime.hooks.signature import accepted_kwargs, annotation, parameter_names
from slime.rollout.rm_hub.calling import call_scorer, reward_value
from slime.rollout.settings import setting
from slime.utils.errors import ScoringError

__all__ = ["score_batch", "score_one"]


async def score_one(args: Any, path: str, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample."""
    function = _resolve(args, path)
    if _takes(function) != "sample":
        return (await _call_batch(args, path, function, [sample], kwargs))[0]
    what = f"--custom-rm-path {path} on sample {sample.index}"
    value = await call_scorer(
        function, args, sample, what=what, timeout_s=setting(args, "rm_timeout"), **accepted_kwargs(function, kwargs)
    )
    return reward_value(args, value, what)


async def score_batch(args: Any, path: str, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of samples that belong together: a group under ``--group-rm``, or the rows of one execution."""
    function = _resolve(args, path)
    # ``sample: Sample | list[Sample]`` says that the function handles both
    takes_list = _takes(function) != "sample" or setting(args, "group_rm") or "list[" in annotation(function, 1)
    if not takes_list:
        return await asyncio.gather(*(score_one(args, path, sample, **kwargs) for sample in samples))
    return await _call_batch(args, path, function, list(samples), kwargs)


async def _call_batch(
    args: Any, path: str, function: Callable[..., Any], samples: list[Sample], kwargs: dict[str, Any]
) -> list[Any]:
    indices = [sample.index for sample in samples]
    what = f"--custom-rm-path {path} on samples {', '.join(map(str, indices[:8]))}{' ...' if len(indices) > 8 else ''}"
    if _takes(function) == "values":
        positional: tuple[Any, ...] = ()
        available = {
            "args": args,
            "prompts": [s.prompt for s in samples],
            "responses": [s.response for s in samples],
            "labels": [s.label for s in samples],
            "samples": samples,
            "metadata": [s.metadata for s in samples],
        }
        keywords = {name: available[name] for name in parameter_names(function) if name in available}
    else:
        positional, keywords = (args, samples), accepted_kwargs(function, kwargs)
    result = await call_scorer(function, *positional, what=what, timeout_s=setting(args, "rm_timeout"), **keywords)
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise ScoringError(f"{what} returned {type(result).__name__}; it must return a list with one reward per sample")
    if len(result) != len(samples):
        raise ScoringError(f"{what} returned {len(result)} rewards for {len(samples)} samples")
    return [reward_value(args, value, what) for value in result]


_instances: dict[type, Any] = {}
"""Reward classes are made once per process: they may hold a model."""


def _resolve(args: Any, path: str) -> Callable[..., Any]:
    """The callable behind the path; of a class, its method."""
    target: Callable[..., Any] = load_function(path, "reward", group_rm=setting(args, "group_rm"))
    if not inspect.isclass(target):
        return target
    if target not in _instances:
        offered = {"args": args, "model_path": setting(args, "hf_checkpoint")}
        _instances[target] = target(**{name: offered[name] for name in parameter_names(target) if name in offered})
    instance = _instances[target]
    method = next((name for name in ("compute_reward", "reward_func") if hasattr(instance, name)), "__call__")
    bound: Callable[..., Any] = getattr(instance, method)
    return bound


def _takes(function: Callable[..., Any]) -> str:
    """``values`` (prompts, responses), ``samples`` or ``sample``."""
    names = parameter_names(function)
    if "prompts" in names and "responses" in names:
        return "values"
    return "samples" if "samples" in names else "sample"
