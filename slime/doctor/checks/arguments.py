"""The command line and the functions that it names."""

from __future__ import annotations

from collections.abc import Iterator

from slime.doctor.finding import Finding, Situation, fail, ok, warn
from slime.hooks.load import check_hooks
from slime.hooks.protocols import HOOKS

__all__ = ["arguments", "hooks", "notices"]


def arguments(situation: Situation) -> Iterator[Finding]:
    """Every problem for which ``train.py`` would refuse to start."""
    for problem in situation.problems:
        yield fail("arguments", problem, "")
    if situation.args is not None and not situation.problems:
        yield ok("arguments", f"{len(situation.args.given)} flags given, no contradiction")


def notices(situation: Situation) -> Iterator[Finding]:
    """What was guessed or dropped."""
    for notice in situation.args.notices if situation.args is not None else ():
        if notice.level == "warning":
            yield warn("arguments", f"{notice.flag}: {notice.text}", "")


def hooks(situation: Situation) -> Iterator[Finding]:
    """Every function that a flag names can be imported and takes what it will be called with."""
    if situation.args is None:
        return
    problems = check_hooks(situation.args)
    for problem in problems:
        yield fail("function", problem, "")
    named = [hook.flag for hook in HOOKS if hook.dest in situation.args.given]
    if not problems:
        yield ok("functions", f"{', '.join(named)}: imported, signatures fit" if named else "slime's own")
