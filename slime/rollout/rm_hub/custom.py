"""Users' rewards: every accepted form of ``--custom-rm-path``, and calls with a deadline.

f(args, sample)                      one sample; under --group-rm it receives the list
f(args, samples)                     a batch, recognized by the parameter's name
f(prompts, responses[, labels])      a batch of plain values
class with compute_reward(...)       made once per process

A function that raises or hangs is a ``ScoringError`` that names it and the sample, which then counts as failed. The
built-in rules keep their deadline in ``grader_pool``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slime.config.groups import from_args
from slime.data.sample import Sample
from slime.data.values import check_entries, reward_number
from slime.hooks.load import accepted_kwargs, annotation, load_function, parameter_names
from slime.rollout.arguments import RewardModelArgs
from slime.rollout.failures import traced_copy
from slime.utils.async_utils import Slots, call_user, is_async
from slime.utils.errors import DataError, ScoringError

# Threads that score at the same time.
_threads = Slots(64)

# One instance per process, because a reward class may hold a model.
_instances: dict[type, Any] = {}


async def score_one(args: Any, path: str, sample: Sample, **kwargs: Any) -> Any:
    """The reward of one sample."""
    function = _resolve(args, path)
    if _takes(function) != "sample":
        return (await _call_batch(args, path, function, [sample], kwargs))[0]
    what = f"--custom-rm-path {path} on sample {sample.index}"
    value = await call_scorer(
        function, args, sample, what=what, timeout_s=args.rm_timeout, **accepted_kwargs(function, kwargs)
    )
    return reward_value(from_args(RewardModelArgs, args).keys, value, what)


async def score_batch(args: Any, path: str, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of samples that belong together: a group under ``--group-rm``, or the rows of one execution."""
    function = _resolve(args, path)
    # The annotation ``Sample | list[Sample]`` shows that the function handles both.
    takes_list = _takes(function) != "sample" or args.group_rm or "list[" in annotation(function, 1)
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
    result = await call_scorer(function, *positional, what=what, timeout_s=args.rm_timeout, **keywords)
    # Arrays and tensors.
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise ScoringError(f"{what} returned {type(result).__name__}; it must return a list with one reward per sample")
    if len(result) != len(samples):
        raise ScoringError(f"{what} returned {len(result)} rewards for {len(samples)} samples")
    return [reward_value(from_args(RewardModelArgs, args).keys, value, what) for value in result]


def _resolve(args: Any, path: str) -> Callable[..., Any]:
    """The callable at ``path``; the method of a class."""
    target: Callable[..., Any] = load_function(path, "reward", group_rm=args.group_rm)
    if not inspect.isclass(target):
        return target
    if target not in _instances:
        # No flag sets rm_model_path. A file of --custom-config-path may.
        offered = {"args": args, "model_path": vars(args).get("rm_model_path") or args.hf_checkpoint}
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


async def call_scorer(function: Callable[..., Any], *args: Any, what: str, timeout_s: float, **kwargs: Any) -> Any:
    """Call ``function`` and await its result. A function that is not async runs in a thread.

    Args:
        what: names function and sample in errors: ``--custom-rm-path a.b on sample 3``.
        timeout_s: seconds from its start.

    Raises:
        ScoringError: it raised, or did not return in time.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        if is_async(function):
            async with limit:
                return await call_user(function, *args, **kwargs)
        # A thread cannot be ended: a late function must not write into samples that the rollout uses again.
        own = [_copied(arg) for arg in args]
        # In this order: waiting for a thread does not count against the limit of the call.
        async with _threads.semaphore, limit:
            result = await call_user(function, *own, **kwargs)
        for arg, copied in zip(args, own, strict=True):
            _take_back(arg, copied)
        return result
    except TimeoutError as error:
        if not limit.expired():  # raised by the function itself
            raise ScoringError(f"{what} raised {type(error).__name__}: {error}") from error
        raise ScoringError(
            f"{what} did not return within {timeout_s:g} s: fix it, or raise --rm-timeout (seconds per call)"
        ) from None
    except DataError:
        # Bad data or a missing library: every sample would fail.
        raise
    except Exception as error:  # the user's code may raise any exception
        raise ScoringError(f"{what} raised {type(error).__name__}: {error}") from error


def _copied(arg: Any) -> Any:
    """Samples, alone or in a list, as copies. Other values are returned unchanged."""
    if isinstance(arg, list):
        return [_copied(item) for item in arg]
    return traced_copy(arg) if isinstance(arg, Sample) else arg


def _take_back(arg: Any, copied: Any) -> None:
    """Apply the changes of a copy to its sample."""
    if isinstance(arg, Sample):
        vars(arg).update(vars(copied))
    elif isinstance(arg, list):
        for item, twin in zip(arg, copied, strict=False):  # the function may have appended to its list
            _take_back(item, twin)


def reward_value(keys: Sequence[str], value: Any, what: str) -> Any:
    """A valid reward by the rule of :mod:`slime.data.values`: a plain number, or a dict.

    Args:
        keys: the entries of reward dicts that are read (:func:`slime.rollout.arguments.RewardModelArgs.keys`).

    Raises:
        ScoringError: it breaks the rule, or is a dict without the entry that is read.
    """
    try:
        if not isinstance(value, dict):
            return reward_number(value)
        if keys and not any(key in value for key in keys):
            have = ", ".join(map(str, value)) or "nothing"
            raise ValueError(f"a dict with the keys {have}, and --reward-key reads {keys[0]!r}")
        return check_entries(value, keys)
    except ValueError as error:
        raise ScoringError(f"{what} returned an invalid reward: {error}") from None
