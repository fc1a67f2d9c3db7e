"""The value of ``--prompt-data``: one source, or several with names and weights.

    data.jsonl@[0:100]                                 a file, and a slice of its rows
    folder, folder:config:split                        a folder of the package datasets
    org/name, org/name@revision:config:split           a data set of the Hub
    math=a.jsonl:3 code=org/name::train@[0:99]:1.5     several, each NAME=SOURCE[:WEIGHT]

One text, also for several sources, because users' functions read ``args.prompt_data`` as a text.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from slime.utils.errors import ConfigError
from slime.utils.misc import as_float

FILE_SUFFIXES = (".jsonl", ".parquet")

_SLICE = re.compile(r"^(.*)@\[(-?\d*):(-?\d*)\]$", re.DOTALL)
_NAMED = re.compile(r"^(?P<name>[A-Za-z_][\w.-]*)=(?P<rest>.+)$")
# A path may have spaces, also one that was made absolute: only a space before NAME= separates.
_BETWEEN = re.compile(r"\s+(?=[A-Za-z_][\w.-]*=)")
_ID = re.compile(r"^(?P<id>[^:@]+)(@(?P<revision>[^:@]+))?(:(?P<config>[^:@]*)(:(?P<split>[^:@]+))?)?$")
_HUB = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_FORM = "several sources are written NAME=SOURCE[:WEIGHT], separated by spaces"


@dataclass(frozen=True)
class PromptSource:
    """One source. ``name`` is empty for the only one. ``path`` includes its slice."""

    name: str
    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class DatasetId:
    """A data set of the package datasets: its folder, or its id on the Hub."""

    id: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.id)


def parse_path(text: str) -> tuple[str, slice | None]:
    """``data.jsonl@[10:-5]`` -> (``data.jsonl``, ``slice(10, -5)``). Anything else is a path without a slice."""
    match = _SLICE.match(text)
    if match is None or "-" in match.groups()[1:]:
        return text, None
    path, start, stop = match.groups()
    return path, slice(int(start) if start else None, int(stop) if stop else None)


def dataset_id(path: str) -> DatasetId | None:
    """The data set that a path without slice names. None for files, and for names that cannot be a data set."""
    if os.path.isdir(path):
        return DatasetId(path)
    match = _ID.match(path)
    if match is None or path.endswith(FILE_SUFFIXES):
        return None
    found = DatasetId(match["id"], match["revision"], match["config"] or None, match["split"])
    return found if found.is_folder or _HUB.match(found.id) else None


def absolute_source(path: str) -> str:
    """``path`` made absolute, with its slice, config and split. Ids of the Hub and the empty path stay."""
    found = dataset_id(parse_path(path)[0])
    if not path or (found is not None and not found.is_folder):
        return path
    return os.path.abspath(os.path.expanduser(path))


def has_names(text: str) -> bool:
    """Whether the value holds sources with names."""
    path = parse_path(text)[0]
    found = dataset_id(path)
    if os.path.exists(path) or (found is not None and found.is_folder):
        return False
    words = text.split()
    return len(words) > 1 or any(_NAMED.match(word) for word in words)


def parse_sources(text: str) -> list[PromptSource]:
    """The sources of ``--prompt-data``.

    Raises:
        ConfigError: a source of another form, an invalid weight, two sources of one name.
    """
    if not has_names(text):
        return [PromptSource("", text)]
    problems: list[str] = []
    sources: list[PromptSource] = []
    words = _BETWEEN.split(text.strip())
    for word in words if all(map(_NAMED.match, words)) else text.split():
        match = _NAMED.match(word)
        if match is None:
            problems.append(f"--prompt-data {word}: {_FORM}.")
            continue
        path, _, last = match["rest"].rpartition(":")
        weight = as_float(last) if path else None
        if weight is None:
            path, weight = match["rest"], 1.0
        if not 0 < weight < math.inf:  # false for NaN too
            problems.append(f"--prompt-data {word}: the weight {last} must be a number above 0.")
        if match["name"] in {source.name for source in sources}:
            problems.append(f"--prompt-data {word}: there are two sources named {match['name']}.")
        sources.append(PromptSource(match["name"], path, weight))
    if problems:
        raise ConfigError(problems)
    return sources


def format_sources(sources: list[PromptSource]) -> str:
    """The inverse of :func:`parse_sources`."""
    if [source.name for source in sources] == [""]:
        return sources[0].path
    return " ".join(f"{source.name}={source.path}:{str(source.weight).removesuffix('.0')}" for source in sources)
