"""No path that a run writes lies on one that it reads or writes as well: one rule over all pairs of paths."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from slime.config.path_flags import UsedPath, used_paths

__all__ = ["RULES"]

_FIELD = re.compile(r"\{[^{}]*\}")
_ANY_FIELD = r"(?:eval_)?\d+"
_DUMP_BEGINS = b"PK"
_HARM = ("replaces", "adds", "reads")


def _overlaps(args: Namespace) -> Iterator[str]:
    for pair in combinations(used_paths(args), 2):
        writer, other = sorted(pair, key=lambda used: _HARM.index(used.flag.does))
        if (reason := _conflict(writer, other) or _conflict(other, writer)) is not None:
            yield reason


def _conflict(writer: UsedPath, other: UsedPath) -> str | None:
    """Why ``writer`` must not write where ``other`` is; None if it may, or if it does not write."""
    if writer.flag.does == "reads" or {writer.flag.name, other.flag.name} == {"load", "save"}:
        return None
    relation = _relation(writer.path, other.path)
    if relation == "equal":
        if writer.flag.does == "adds" and other.flag.does == "adds":
            return None
        if writer.flag.does == "adds" and writer.flag.name != "save" and other.flag.is_directory:
            return None
        kind = "directory" if writer.flag.is_directory else "file"
        return f"{writer} and {other} are the same {kind}: {_harm(writer)}. Name two."
    if relation == "holds" and writer.flag.does == "replaces":
        return f"{writer} contains {other}: {_harm(writer)}. Name a path that holds nothing else."
    if relation == "holds" and not writer.flag.is_directory:
        return f"{writer} is to be a file, but {other} lies in it. Name another path."
    return None


def _harm(writer: UsedPath) -> str:
    if writer.flag.does == "adds":
        return "this run's checkpoints would take the place of what is read there"
    return f"it is replaced by {writer.flag.what}"


def _relation(one: str, other: str) -> str | None:
    """``equal``: some values of the fields make them the same path; ``holds``: the second lies below the first."""
    first, second = Path(one).parts, Path(other).parts
    if len(first) > len(second) or not all(map(_can_be_same, first, second)):
        return None
    return "equal" if len(first) == len(second) else "holds"


def _can_be_same(one: str, other: str) -> bool:
    if _FIELD.search(one) and _FIELD.search(other):  # a run puts the same numbers into all
        return _FIELD.sub("0", one) == _FIELD.sub("0", other)
    if _FIELD.search(other):
        one, other = other, one
    if not _FIELD.search(one):
        return one == other
    pattern = _ANY_FIELD.join(re.escape(part) for part in _FIELD.split(one))
    return re.fullmatch(pattern, other) is not None


def _dumps(args: Namespace) -> Iterator[str]:
    """A dump replaces a dump, and no other file of the user."""
    for used in used_paths(args):
        if used.flag.does != "replaces" or used.flag.is_directory:
            continue
        path = Path(used.path)
        if not path.parent.is_dir():
            continue
        for entry in path.parent.iterdir():
            if _can_be_same(path.name, entry.name) and entry.is_file() and not _is_dump(entry):
                yield f"{used}: {entry} is there and is no dump of a run; it would be replaced. Name another path."


def _is_dump(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_DUMP_BEGINS)) == _DUMP_BEGINS
    except OSError:
        return False


RULES = (_overlaps, _dumps)
