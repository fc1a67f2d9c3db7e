"""The prompt ledger, an append-only file with the fate of every prompt, and its audit, ``slime doctor ledger``.

    begin      {"rollout": R, "groups": ...}   the run starts, or starts again, at rollout R. Groups given back to it.
                                               "changed" if the data are not those of the run before. "trains": T
                                               if the batches of rollouts T to R - 1 are kept, and trained on again
    drawn      {"groups": "0-15"}              handed out to a rollout function
    returned   {"groups": "3 9-11"}            given back, unfinished: they will be drawn again
    used       {"rollout": R, "groups": ...}   part of rollout R's batch
    dropped    {"rollout": R, "groups": ...}   filtered, aborted or given up during rollout R: they do not come back
    saved      {"rollout": R, "groups": ...}   the state after R was written. Groups under way
    trained    {"rollout": R}                  the trainer took its steps on rollout R

Groups are the numbers that the data source counts. A start at rollout R goes back to the state saved for R - 1: later
lines were replayed. They stay in the file and do not count.

Written by the Data Buffer. The audit finds prompts that were lost or trained on twice.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypedDict, get_args

from slime.utils.errors import DataError

LEDGER = "ledger.jsonl"

_BLOCK = 1 << 20

Event = Literal["begin", "drawn", "returned", "used", "dropped", "saved", "trained"]


class Entry(TypedDict, total=False):
    """One line. ``at`` is in seconds since 1970, ``groups`` has the form of :func:`format_numbers`. ``changed`` of a
    ``begin`` is the reason why the following prompts may not continue the earlier ones.
    """

    event: Event
    at: float
    rollout: int
    groups: str
    changed: str
    trains: int


def ledger_path(save: str | None, run: Path) -> Path:
    """Under ``--save`` next to the states of the data source, with which it continues, else in the run's folder."""
    return Path(save) / "rollout" / LEDGER if save is not None else run / LEDGER


class LineFile:
    """A file of JSON lines that is opened for appending. A torn last line is cut off."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        _cut_torn_line(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, entry: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append one line. A killed process does not lose it after the return, with ``sync`` nor does a power failure.

        Raises:
            OSError: the line could not be written, as on a full disk. No part of it is left.
        """
        line = (json.dumps(entry) + "\n").encode()
        # One call for the whole line: a killed process leaves at most one torn line, which the next start cuts off.
        written = os.write(self._descriptor, line)
        if written < len(line):  # a full disk takes a part, and the next line would be appended to it
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        if sync:
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Ledger(LineFile):
    """The writing end of the ledger."""

    def write(
        self,
        event: Event,
        *,
        rollout: int | None = None,
        groups: Iterable[object] | None = None,
        changed: str | None = None,
        trains: int | None = None,
    ) -> None:
        """Append one line, except for events without a group. Raises as :meth:`append`."""
        entry: Entry = {"event": event, "at": round(time.time(), 3)}
        if rollout is not None:
            entry["rollout"] = rollout
        if changed is not None:
            entry["changed"] = changed
        if trains is not None:
            entry["trains"] = trains
        if groups is not None:
            entry["groups"] = format_numbers(groups)
            if not entry["groups"] and event in ("drawn", "returned", "dropped"):
                return
        # A checkpoint may count on these, also after the machine lost its power.
        self.append(entry, sync=event in ("saved", "trained"))


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = place = path.stat().st_size
        whole = 0
        while place > 0 and whole == 0:  # from the end: the file of a long run is large
            place = max(0, place - _BLOCK)
            file.seek(place)
            found = file.read(_BLOCK).rfind(b"\n")
            whole = 0 if found < 0 else place + found + 1
        if whole < size:
            file.truncate(whole)


def format_numbers(numbers: Iterable[object]) -> str:
    """Format as ``"0-15 20"``. Other values than numbers are left out: users' sources need not count their groups."""
    ordered = sorted({number for number in numbers if isinstance(number, int)})
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parse_numbers(text: str) -> list[int]:
    """The inverse of :func:`format_numbers`."""
    numbers: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def read_ledger(path: Path) -> tuple[list[Entry], int]:
    """Entries in order, and the number of lines that are not entries (one torn last line is usual after a kill)."""
    entries: list[Entry] = []
    unreadable = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            if entry["event"] not in get_args(Event):
                raise ValueError(entry["event"])
            parse_numbers(entry.get("groups", ""))
        except (ValueError, TypeError, KeyError, AttributeError):
            unreadable += 1
        else:
            entries.append(entry)
    return entries, unreadable


@dataclass
class Audit:
    """The fate of the prompts.

    Attributes:
        lost: group number -> how it was lost.
        twice: group number -> the rollouts that trained on it.
        counts: groups by fate (``trained``, ``used``, ``dropped``, ``waiting``, ``under way``).
        num_rollouts: rollouts that were trained on.
        num_starts: how often the run began.
        num_replayed: lines that a later start replayed.
        unknown: per start that continued with changed data, the reason: groups are numbers of draws, and which prompt
            of the file a number is cannot be compared across such a start.
    """

    lost: dict[int, str] = field(default_factory=dict)
    twice: dict[int, list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    num_rollouts: int = 0
    num_starts: int = 0
    num_replayed: int = 0
    unknown: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.lost and not self.twice and not self.unknown


def audit(entries: Sequence[Entry]) -> Audit:
    """Follow every prompt through the entries that count."""
    effective, num_replayed = _without_replayed(entries)
    books = _Books()
    for entry in effective:
        books.enter(entry)
    result = books.close(num_starts=sum(e["event"] == "begin" for e in entries), num_replayed=num_replayed)
    result.unknown = [f"rollout {e.get('rollout')}: {e['changed']}" for e in effective if "changed" in e]
    return result


def _without_replayed(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """The entries of the current weights: a start at rollout R undoes all after the state saved for R - 1.

    It also undoes the training on rollouts that its weights do not know.
    """
    kept: list[Entry] = []
    for entry in entries:
        if entry["event"] == "begin":
            last = entry["rollout"] - 1
            saved = [i for i, e in enumerate(kept) if e["event"] == "saved" and e["rollout"] == last]
            cut = saved[-1] + 1 if saved else 0  # no such state: another history, or none
            first = entry.get("trains", entry["rollout"])
            # The ``trained`` line of a rollout may come after its ``saved`` line.
            trained = [e for e in kept[cut:] if saved and e["event"] == "trained"]
            kept = [e for e in [*kept[:cut], *trained] if e["event"] != "trained" or e["rollout"] < first]
        kept.append(entry)
    return kept, len(entries) - len(kept)


@dataclass
class _Books:
    """The state of every group while the entries are read in order."""

    state: dict[int, str] = field(default_factory=dict)
    users: dict[int, list[int]] = field(default_factory=dict)
    trained: Counter[int] = field(default_factory=Counter)
    lost: dict[int, str] = field(default_factory=dict)

    def enter(self, entry: Entry) -> None:
        groups, rollout = parse_numbers(entry.get("groups", "")), entry.get("rollout", -1)
        match entry["event"]:
            case "begin":
                self._begin(rollout, set(groups))
            case "drawn":
                self._set(groups, "under way")
                for number in groups:
                    self.lost.pop(number, None)  # returned after a restart
            case "returned":
                self._set(groups, "waiting")
            case "used":
                self._set(groups, "used")
                for number in groups:
                    self.users.setdefault(number, []).append(rollout)
            case "dropped":
                self._set(groups, "dropped")
            case "trained":
                self.trained[rollout] += 1
            case "saved":
                pass

    def _set(self, groups: Iterable[int], state: str) -> None:
        self.state.update(dict.fromkeys(groups, state))

    def _begin(self, rollout: int, given_back: set[int]) -> None:
        """Groups under way ended with their process. They are in the saved state, or they are lost."""
        for number, state in self.state.items():
            if state == "under way" and number not in given_back:
                self.lost[number] = f"under way when the run started again at rollout {rollout}, and not given back"
        self._set(given_back, "waiting")

    def close(self, *, num_starts: int, num_replayed: int) -> Audit:
        result = Audit(lost=dict(self.lost), num_starts=num_starts, num_replayed=num_replayed)
        result.num_rollouts = len(self.trained)
        newest = max(self.trained, default=-1)
        for number, rollouts in self.users.items():
            trained = [rollout for rollout in rollouts for _ in range(self.trained[rollout])]
            if len(trained) > 1:
                result.twice[number] = trained
            elif trained:
                self.state[number] = "trained"
            # Not an error yet for the newest rollouts: the trainer may still work on them.
            elif min(rollouts) < newest:
                result.lost[number] = f"in the batch of rollout {rollouts[0]}, which was never trained on"
        for number in _gaps(self.state):
            result.lost[number] = "never handed out, although prompts after it were"
        result.counts = Counter(self.state.values())
        return result


def _gaps(seen: Iterable[int]) -> Iterator[int]:
    """Numbers between the smallest and the largest of ``seen`` that are not in it."""
    ordered = sorted(seen)
    for before, after in itertools.pairwise(ordered):
        yield from range(before + 1, after)


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
