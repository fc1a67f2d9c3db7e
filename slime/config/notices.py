"""Decisions about values that the command line leaves open: collected while resolving, logged once, shown by the plan.

Written by the steps of the resolution, read by ``parse_args`` (log, ``--strict-args``) and ``slime plan``.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Notice:
    """One decision. ``warning``: probably unintended, an error under ``--strict-args``. ``info``: a default."""

    level: Literal["info", "warning"]
    flag: str
    text: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.text}"


def warn(args: Namespace, flag: str, text: str) -> None:
    """Record that ``flag`` (with dashes) was dropped, replaced or guessed, and why."""
    args.notices.append(Notice("warning", flag, text))


def info(args: Namespace, flag: str, text: str) -> None:
    """Record how the value of ``flag`` was derived."""
    args.notices.append(Notice("info", flag, text))
