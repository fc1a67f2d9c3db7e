"""Which values are valid rewards: one rule for users' functions, services, and the samples of a batch.

a number        bool, int, float, or a scalar of numpy or torch; finite, and at most 1e16 in magnitude
a dict          the entries that --reward-key and --eval-reward-key name are such numbers; every other number in it,
                however deep, is finite and fits in fp32, because it is logged; other values are left alone
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

MAX_REWARD = 1e16
"""Group statistics are computed in fp32: the squares of a million such rewards still sum to less than its 3.4e38."""
_MAX_FLOAT32 = 3.4028234663852886e38


def reward_number(value: Any, name: str = "reward") -> bool | int | float:
    """``value`` as a plain number.

    Args:
        name: its name in the message.

    Raises:
        ValueError: it breaks the rule.
    """
    value = _plain(value, name)
    if isinstance(value, str):
        raise ValueError(f"{name} is the text {value[:80]!r}; a reward is a number, so convert it: float(...)")
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{name} is of type {type(value).__name__}; a reward is a number or a dict of numbers")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a reward is a finite number")
    if abs(value) > MAX_REWARD:
        raise ValueError(
            f"{name} is {_shown(value)}; a reward is at most {MAX_REWARD:g} in magnitude, so that sums of squares fit "
            "in fp32"
        )
    return value


def check_entries(reward: dict[Any, Any], keys: Iterable[str]) -> dict[Any, Any]:
    """A dict reward with plain numbers under ``keys``.

    Raises:
        ValueError: an entry breaks the rule; it is named by its path, as ``reward['parts'][0]``.
    """
    numbers = {key: reward_number(reward[key], f"reward[{key!r}]") for key in keys if key in reward}
    try:
        _check_nested(reward, "reward")
    except RecursionError:
        raise ValueError("reward is nested too deeply, or contains itself; store a flat dict") from None
    return {**reward, **numbers}


def _check_nested(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_nested(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check_nested(item, f"{name}[{position}]")
    elif getattr(value, "shape", None) == ():
        _check_nested(_plain(value, name), name)
    elif isinstance(value, int | float) and not abs(value) <= _MAX_FLOAT32:  # NaN compares as false
        raise ValueError(f"{name} is {_shown(value)}; a number in a reward is finite and fits in fp32")


def _plain(value: Any, name: str) -> Any:
    """Scalars of numpy and torch as Python's."""
    if not hasattr(value, "item") or isinstance(value, dict):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError, TypeError):
        shape = tuple(getattr(value, "shape", ()))
        raise ValueError(f"{name} is a {type(value).__name__} of shape {shape}; a reward is one number") from None


def _shown(value: float) -> str:
    """A huge integer has no text that Python would make."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else str(value)
