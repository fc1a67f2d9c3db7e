"""``slime doctor``: can this machine run that train command? One line per check, with a fix for each failure.

``machine_checks`` and ``command_checks`` hold one small function per check. To add a check, write its function, its row
in ``command_checks.CHECKS``, and a test that makes it fail.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal, TypeVar

from slime.utils.errors import kept, named

T = TypeVar("T")

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


def examine(situation: T, checks: Sequence[Callable[[T], Iterator[Finding]]]) -> list[Finding]:
    """All findings. A check that raises is a finding, too, and the others still run.

    Args:
        situation: the input of the checks.
    """
    findings: list[Finding] = []
    for check in checks:
        errors: list[Exception] = []
        with kept(errors):  # checks read arbitrary files and machines: one surprise must not hide the rest
            findings += check(situation)
        if errors:
            name = check.__name__.replace("_", " ")
            findings.append(Finding("fail", name, f"the check itself failed: {named(errors[0])}"))
    return findings


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if a check failed, else 0."""
    return int(any(finding.status == "fail" for finding in findings))


_MARKS = {
    **{"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[bold red]FAIL[/bold red]"},
    "skip": "[dim]n/a[/dim]",
}


def render(findings: Sequence[Finding], stream: IO[str] | None = None) -> None:
    """Print one line per finding, with the fix below problems."""
    # Not above: the measurements of a GPU (gpu_check) do without them.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from slime.config.parse import terminal_width

    stream = stream or sys.stdout
    console = Console(file=stream, width=terminal_width(), highlight=False, no_color=not stream.isatty(), emoji=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=4)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        fix = f"\n[dim]fix:[/dim] {escape(finding.fix)}" if finding.fix else ""
        table.add_row(_MARKS[finding.status], escape(finding.what), escape(finding.value) + fix)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in _MARKS}
    skipped = f"{counts['skip']} not applicable, " if counts["skip"] else ""
    console.print(f"\n{counts['ok']} ok, {counts['warn']} to look at, {skipped}{counts['fail']} failed")


def render_json(findings: Sequence[Finding], stream: IO[str] | None = None) -> None:
    """``{"schema": 1, "findings": [{"status", "what", "value", "fix"}, ...]}``."""
    records = [dataclasses.asdict(finding) for finding in findings]
    print(json.dumps({"schema": 1, "findings": records}, indent=2), file=stream or sys.stdout)
