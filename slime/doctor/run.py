"""Run every check and print its findings. Called by ``slime.cli``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime.config.parse import terminal_width
from slime.doctor import Finding
from slime.utils.errors import kept, named

T = TypeVar("T")

_MARKS = {
    **{"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[bold red]FAIL[/bold red]"},
    "skip": "[dim]n/a[/dim]",
}


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


def render(findings: Sequence[Finding], stream: IO[str] | None = None) -> None:
    """Print one line per finding, with the fix below problems."""
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
