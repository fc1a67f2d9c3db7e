"""The rules for values of data rows and for rewards.

Row values that later steps cannot represent:

    lone surrogates (no tokenizer and no UTF-8 file accepts them)          refused
    numbers of > 4300 digits, more than 100 levels of nesting              refused
    dates, decimal numbers and maps of Parquet                             become text, text and objects

Rewards of users' functions, services, and the samples of a batch:

    a number    bool, int, float, or a scalar of numpy or torch; finite, and at most 1e16 in magnitude
    a dict      the entries of --reward-key and --eval-reward-key are such numbers. Every other number in it, at any
                depth, is finite and fits in fp32, because it is logged. Other values are not checked
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import sys
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from slime.utils.errors import DataError


@runtime_checkable
class Array(Protocol):
    """Arrays, tensors and scalars of numpy and torch."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def item(self) -> Any: ...

    def tolist(self) -> Any: ...


_MAX_LEVELS = 100
_SHOWN = 60


def parse_json(where: str, text: str) -> Any:
    """The value of a JSON text.

    Args:
        where: file, line and field, for the message.

    Raises:
        DataError: not JSON, or a value that later steps cannot hold.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError(f"{where}: {_too_deep()}") from None
    # json raises it for integers with too many digits only. JSONDecodeError is a subclass.
    except ValueError:
        limit = sys.get_int_max_str_digits()
        raise DataError(
            f"{where}: a whole number has more than {limit} digits: write it as text, in quotation marks"
        ) from None
    # Only an escape can make a lone surrogate: the bytes of the file are valid UTF-8.
    if "\\u" in text:
        _refuse_surrogates(where, text, value)
    # Counting the brackets is cheap, and enough for nearly all rows.
    if text.count("[") + text.count("{") > _MAX_LEVELS and _levels(value) > _MAX_LEVELS:
        raise DataError(f"{where}: {_too_deep()}")
    return value


def check_label(where: str, key: str, label: Any) -> Any:
    """The label, unless it is NaN or infinite, as missing values of a table become."""
    if isinstance(label, float) and not math.isfinite(label):
        raise DataError(
            f"{where}: {key!r} (--label-key) is {label}, so the row has no label: write a text or a number, null for a "
            "reward that reads no label, or leave out the row"
        )
    return label


def plain_value(value: Any) -> Any:
    """A Parquet value with dates and decimal numbers as text: states and records hold JSON values."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    return [plain_value(item) for item in value] if isinstance(value, list) else value


def _too_deep() -> str:
    return (
        f"values are nested in more than {_MAX_LEVELS} levels: flatten the row, or store the inner value as JSON text"
    )


def _refuse_surrogates(where: str, text: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        begin = max(0, error.start - _SHOWN // 2)
        near = str(error.object)[begin : begin + _SHOWN].encode("ascii", "backslashreplace").decode()
        raise DataError(
            f"{where}: the escape \\u{ord(str(error.object)[error.start]):04x} is half of a character (a lone "
            f"surrogate), which no tokenizer takes, near {near!r}: write both halves, or remove it"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: {_too_deep()}") from None


def _levels(value: Any) -> int:
    """Nesting of lists and objects, counted without recursion."""
    level, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        level += 1
        layer = [inner for item in layer for inner in (item.values() if isinstance(item, dict) else item)]
    return level


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
        ValueError: an entry breaks the rule. The message has its path, as ``reward['parts'][0]``.
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
    elif isinstance(value, Array) and value.shape == ():
        _check_nested(_plain(value, name), name)
    elif isinstance(value, int | float) and not abs(value) <= _MAX_FLOAT32:  # NaN compares as false
        raise ValueError(f"{name} is {_shown(value)}; a number in a reward is finite and fits in fp32")


def _plain(value: Any, name: str) -> Any:
    """Scalars of numpy and torch as Python's."""
    if not isinstance(value, Array):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError, TypeError):
        kind = f"{type(value).__name__} of shape {tuple(value.shape)}"
        raise ValueError(f"{name} is a {kind}; a reward is one number") from None


def _shown(value: float) -> str:
    """A number as text. Python refuses to convert a huge integer."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else str(value)
