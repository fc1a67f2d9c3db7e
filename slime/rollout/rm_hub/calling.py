"""Calling code that scores: in a thread when it is not async, never without a deadline, errors with an address.

A user's function that raises or hangs is a ``ScoringError`` that names it and the sample, which then counts as failed.
Built-in rules keep their deadline in ``grader_pool``.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from slime.data.reward import check_entries, reward_number
from slime.data.sample import Sample
from slime.rollout.failures import fresh_copy, reward_keys
from slime.utils.async_utils import call_user, is_async
from slime.utils.errors import DataError, ScoringError

__all__ = ["call_scorer", "reward_value"]

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
