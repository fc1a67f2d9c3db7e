"""Users' rewards: ``--custom-rm-path`` in every form that is accepted.

f(args, sample)                      one sample; under --group-rm it receives the list
f(args, samples)                     a batch, recognised by the parameter's name
f(prompts, responses[, labels])      a batch of plain values
class with compute_reward(...)       made once per process
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from slime.data.reward import check_entries, reward_number
from slime.data.sample import Sample
from slime.hooks.load import accepted_kwargs, annotation, load_function, parameter_names
from slime.rollout.failures import fresh_copy, reward_keys
from slime.rollout.settings import setting
from slime.utils.async_utils import call_user, is_async
from slime.utils.errors import DataError, ScoringError

__all__ = ["call_scorer", "reward_value", "score_batch", "score_one"]


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


# Calling code that scores: in a thread when it is not async, never without a deadline, errors with an address.
#
# A function of users that raises or hangs is a ``ScoringError`` that names it and the sample, which then counts as
# failed.
# Built-in rules keep their deadline in ``grader_pool``.

_MAX_THREADS = 64


class _Slots:
    """Threads that score at the same time, per event loop (a semaphore belongs to one)."""

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._by_loop = weakref.WeakKeyDictionary()

    def current(self) -> asyncio.Semaphore:
        return self._by_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MAX_THREADS))


_slots = _Slots()


async def call_scorer(function: Callable[..., Any], *args: Any, what: str, timeout_s: float, **kwargs: Any) -> Any:
    """Call ``function`` and await its result.

    Args:
        what: who it is and what it scores, for errors: ``--custom-rm-path a.b on sample 3``.
        timeout_s: seconds from the moment it starts.

    Raises:
        ScoringError: it raised, or did not return in time.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        if is_async(function):
            async with limit:
                return await call_user(function, *args, **kwargs)
        # threads cannot be ended: one that is late must not write into samples that have gone on without it
        own = [_copied(arg) for arg in args]
        async with _slots.current(), limit:
            result = await call_user(function, *own, **kwargs)
        for arg, copied in zip(args, own, strict=True):
            _take_back(arg, copied)
        return result
    except TimeoutError as error:
        if not limit.expired():  # its own
            raise ScoringError(f"{what} raised {type(error).__name__}: {error}") from error
        raise ScoringError(
            f"{what} did not return within {timeout_s:g} s: fix it, or raise --rm-timeout (seconds per call)"
        ) from None
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ScoringError(f"{what} raised {type(error).__name__}: {error}") from error


def _copied(arg: Any) -> Any:
    """Samples, alone or in a list, as copies; anything else as it is."""
    if isinstance(arg, list):
        return [_copied(item) for item in arg]
    if not isinstance(arg, Sample):
        return arg
    copied = fresh_copy(arg)
    if hasattr(arg, "trace"):
        copied.trace = arg.trace  # type: ignore[attr-defined]  # open spans go on in it
    return copied


def _take_back(arg: Any, copied: Any) -> None:
    """What a function changed in its copies becomes true of the samples."""
    if isinstance(arg, Sample):
        vars(arg).update(vars(copied))
    elif isinstance(arg, list):
        for item, twin in zip(arg, copied, strict=False):  # it may have grown
            _take_back(item, twin)


def reward_value(args: Any, value: Any, what: str) -> Any:
    """A reward by the rule of :mod:`slime.data.reward`: a plain number, or a dict.

    Raises:
        ScoringError: it breaks the rule, or is a dict without the entry that is read.
    """
    try:
        if not isinstance(value, dict):
            return reward_number(value)
        keys = reward_keys(args)
        if keys and not any(key in value for key in keys):
            have = ", ".join(map(str, value)) or "nothing"
            raise ValueError(f"a dict with the keys {have}, and --reward-key reads {keys[0]!r}")
        return check_entries(value, keys)
    except ValueError as error:
        raise ScoringError(f"{what} returned an invalid reward: {error}") from None
