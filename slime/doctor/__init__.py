"""``slime doctor``: can this machine run that train command? One line per check, with a fix for each failure.

``machine_checks`` and ``command_checks`` hold one small function per check. ``run`` calls them and prints the findings.
To add a check, write its function, its row in ``command_checks.CHECKS``, and a test that makes it fail.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One line of the output: the subject, its value, and a fix. ``skip``: not applicable, the value is the reason."""

    status: Status
    what: str
    value: str
    fix: str = ""


@dataclass(frozen=True)
class Situation:
    """The input of a check.

    Attributes:
        args: the resolved train command; None without a command, or if it is invalid.
        problems: sentences from the checks of the command line.
        is_deep: run slow checks, too.
    """

    args: Namespace | None = None
    problems: tuple[str, ...] = ()
    is_deep: bool = False


Check = Callable[[Situation], Iterator[Finding]]
"""Yields findings, or nothing if it does not apply."""


def ok(what: str, value: str) -> Finding:
    return Finding("ok", what, value)


def warn(what: str, value: str, fix: str) -> Finding:
    return Finding("warn", what, value, fix)


def fail(what: str, value: str, fix: str) -> Finding:
    return Finding("fail", what, value, fix)


def skip(what: str, reason: str) -> Finding:
    return Finding("skip", what, reason)
