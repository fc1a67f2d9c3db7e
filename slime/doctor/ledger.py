"""``slime doctor ledger``: finds prompts that were lost or trained on twice. Called by ``slime.cli``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from slime.data.ledger import LEDGER, Audit, audit, format_numbers, ledger_path, read_ledger
from slime.utils.errors import DataError

_EXAMPLES = 5


def find_ledger(path: Path) -> Path:
    """The ledger that ``path`` is, holds, or (a run's folder) points to.

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return path
    # A folder with the ledger itself, or a --save directory.
    for held in (path / LEDGER, ledger_path(str(path), path)):
        if held.is_file():
            return held
    named = _named_by_run(path / "progress.json")
    if named is not None and named.is_file():
        return named
    raise DataError(f"{path} holds no {LEDGER}: name the ledger, the folder of a run, or a directory of checkpoints.")


def _named_by_run(progress: Path) -> Path | None:
    """The ledger that the run's progress file names; None if it names none or is unreadable."""
    try:
        named = json.loads(progress.read_text(encoding="utf-8"))["ledger"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return None if named is None else Path(named)


def examine_ledger(path: Path, stream: IO[str] | None = None) -> int:
    """Print the fate of all prompts.

    Returns:
        0 if no prompt was lost or trained on twice, else 1. Also 1 if it is unknown.
    """
    stream = stream or sys.stdout
    found = find_ledger(path)
    entries, num_unreadable = read_ledger(found)
    result = audit(entries)
    print(f"{found}: {_summary(result)}", file=stream)
    if num_unreadable:
        print(f"  {num_unreadable} unreadable line(s), left by a process that was killed while writing", file=stream)
    if result.lost:
        _list("LOST", dict(sorted(result.lost.items())), stream)
    if result.twice:
        reasons = {number: f"trained on in rollouts {rollouts}" for number, rollouts in sorted(result.twice.items())}
        _list("TRAINED TWICE", reasons, stream)
    for reason in result.unknown:
        print(f"UNKNOWN: whether prompts were skipped or repeated at the start of {reason}", file=stream)
    if result.is_clean:
        print("ok: no prompt was lost, none was trained on twice", file=stream)
    return int(not result.is_clean)


def _summary(result: Audit) -> str:
    groups = ", ".join(f"{count} {state}" for state, count in sorted(result.counts.items())) or "none"
    starts = f"{result.num_starts} start{'s' if result.num_starts != 1 else ''}"
    replayed = f" ({result.num_replayed} lines were replayed and do not count)" if result.num_replayed else ""
    return f"{result.num_rollouts} rollouts trained, {starts}{replayed}; groups: {groups}"


def _list(title: str, reasons: Mapping[int, str], stream: IO[str]) -> None:
    print(f"{title}: {len(reasons)} groups: {format_numbers(reasons)}", file=stream)
    for number in list(reasons)[:_EXAMPLES]:
        print(f"  group {number}: {reasons[number]}", file=stream)
