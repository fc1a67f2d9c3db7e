"""Values of data rows that later steps cannot hold: refused with their row, or brought into a form that works.

    lone surrogates      no tokenizer and no UTF-8 file takes them         refused
    numbers of > 4300 digits, more than 100 levels of nesting              refused
    dates, decimal numbers and maps of Parquet                             become text, text and objects

Called where prompt files are read. Knows no rollout.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import sys
from typing import Any

from slime.utils.errors import DataError

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
    except ValueError:
        limit = sys.get_int_max_str_digits()
        raise DataError(
            f"{where}: a whole number has more than {limit} digits: write it as text, in quotation marks"
        ) from None
    if "\\u" in text:
        _refuse_surrogates(where, text, value)
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
