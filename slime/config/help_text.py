"""How ``--help`` looks: grouped, 100 columns, one short word per value, defaults only where they say something."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["USAGE", "HelpFormatter"]

USAGE = """%(prog)s --hf-checkpoint DIR --prompt-data FILE --rollout-num-gpus N [flag ...]

  slime plan %(prog)s [flag ...]      what the command will do, without doing it
  slime doctor %(prog)s [flag ...]    whether this machine can do it"""

_LONGEST_CHOICES = 40
_WORDS = {int: "N", float: "X", str: "TEXT"}


class HelpFormatter(argparse.HelpFormatter):
    """argparse's own, without a usage of hundreds of flags and without ``FLAG_NAME FLAG_NAME``."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=100)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if _is_long_choice(action):
            return lambda count: ("CHOICE",) * count
        return super()._metavar_formatter(action, default_metavar)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _WORDS.get(action.type, "VALUE") if isinstance(action.type, type) else _of_callable(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").replace("%", "%%").replace("%%(", "%(")
        if _is_long_choice(action):
            text = f"{text} One of {', '.join(map(str, action.choices or ()))}."
        is_telling = action.default not in (None, argparse.SUPPRESS, [], {}, "") and not isinstance(
            action.default, bool
        )
        if action.option_strings and is_telling and "default" not in text.lower():
            text = f"{text} Default: {action.default}."
        return text


def _is_long_choice(action: argparse.Action) -> bool:
    return action.choices is not None and sum(len(str(choice)) + 1 for choice in action.choices) > _LONGEST_CHOICES


def _of_callable(action: argparse.Action) -> str:
    """Values read by a function: JSON objects are the common ones."""
    return "JSON" if "json" in getattr(action.type, "__name__", "") else "TEXT"
