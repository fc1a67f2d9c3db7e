"""Keys and passwords among arguments: what a run writes about itself does not hold them.

Told by their name, as a flag, an environment variable or an entry of a JSON object, and by their place in a URL. Called
by whoever shows arguments to others: ``run_info``, the W&B sink and the log-prob server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["hide_secrets", "hide_secrets_of_words"]

_HIDDEN = "***"
_NAME = re.compile(
    r"(?:(?:wandb|api|access|private|secret)[-_]?key|secret|passw(?:or)?d|(?:hf|hub|auth|access|api|bearer|session)[-_]?token)$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s\"']+(?=@)")


def hide_secrets(value: Any, name: str = "") -> Any:
    """``value`` of the argument ``name`` with ``***`` for every secret in it; of another type only where it is one."""
    if value is not None and value != "" and _NAME.search(name):
        return _HIDDEN
    match value:
        case dict():
            return {key: hide_secrets(item, str(key)) for key, item in value.items()}
        case list() | tuple() if all(isinstance(item, str) for item in value):
            return hide_secrets_of_words(value)  # a part of a command line, perhaps
        case list() | tuple():
            return [hide_secrets(item) for item in value]
        case str():
            return _hide_in_text(value)
        case _:
            return value


def hide_secrets_of_words(words: Sequence[str]) -> list[str]:
    """The same for a command line: ``--wandb-key s``, ``--wandb-key=s``, ``--train-env-vars '{"HF_TOKEN": "s"}'``, and
    for settings of variables: ``HF_TOKEN=s``."""
    result: list[str] = []
    is_value_of_secret = False
    for word in words:
        flag, equals, value = word.partition("=")
        is_flag = flag.startswith("--")
        if is_value_of_secret and not is_flag:
            result.append(_HIDDEN)
        elif equals and (is_flag or _NAME.search(flag)):
            result.append(f"{flag}={hide_secrets(value, flag)}")
        else:
            result.append(_hide_in_text(word))
        is_value_of_secret = is_flag and not equals and _NAME.search(flag) is not None
    return result


def _hide_in_text(text: str) -> str:
    if text.startswith("{"):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if (hidden := hide_secrets(found)) != found:
            return json.dumps(hidden, ensure_ascii=False)
    return _IN_URL.sub(_HIDDEN, text)
