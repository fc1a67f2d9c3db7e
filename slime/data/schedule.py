"""The schedule of a deterministic run: which weights generated each part of each trained response, and its batch.

    schedule.jsonl    {"batch": R, "samples": [[group, index, crc, [[version, end], ...]], ...]}    trained in rollout R
                      {"event": "aborted", "groups": "3 9-11"}    returned with the tokens so far, to be continued
                      {"event": "retried", "groups": "3"}         generated again from the prompt after an error
                      {"event": "stale", "groups": "3"}           too old for its batch: drawn again from the prompt
                      {"event": "begin", "rollout": R}            a start of the run, which makes R and later ones anew
    branch.jsonl      {"begun": {...}}                            a sample that weights before the branch generated
    weights.jsonl     {"names": [...]}                            of the tensors in the lines below, in their order
                      {"version": V, "hash": "...", "tensors": "8 hex digits per tensor"}
                      {"event": "begin", "version": V}            a start of the run, which makes later ones anew

``end`` counts response tokens: weights ``version`` generated those from the end before. ``crc`` is the CRC-32 of all
tokens as 32-bit integers. The last line of a batch or version counts, because a resumed run may repeat it. Both files
are next to the ledger. The rollout manager writes the first, the driver the other. Read by ``slime replay --all``.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from slime.data.ledger import LineFile, format_numbers
from slime.data.sample import Sample, iter_samples
from slime.utils.errors import DataError

SCHEDULE = "schedule.jsonl"
WEIGHTS = "weights.jsonl"
BRANCH = "branch.jsonl"

Event = Literal["aborted", "retried", "stale"]

_DIGITS = 8


@dataclass(frozen=True, slots=True)  # slots: there is one for every sample of a run
class Planned:
    """One trained sample.

    Attributes:
        group, index: numbers of the data source.
        crc: of all its tokens.
        parts: (weight version, end) of each request. The version is None if no engine reported a number.
        failed: the boundary at which it was given up. Empty for a sample that was trained on.
    """

    group: int
    index: int
    crc: int
    parts: tuple[tuple[int | None, int], ...]
    failed: str = ""


def note_part(sample: Sample, version: object) -> None:
    """Note that weights ``version`` generated the response of ``sample`` from the last part to its end."""
    number = int(str(version)) if str(version).isdecimal() else None
    sample.parts = [*parts_of(sample), [number, sample.response_length]]


def parts_of(sample: Sample) -> list[list[int | None]]:
    """The parts that :func:`note_part` has noted."""
    return sample.parts or []


class Schedule:
    """The writing end of ``schedule.jsonl``."""

    current: ClassVar[Schedule | None] = None
    """That of this process. None unless the run is deterministic."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def begin(self, rollout_id: int) -> None:
        """Record a start of the run that generates ``rollout_id`` and later rollouts anew."""
        self._file.append({"event": "begin", "rollout": rollout_id})

    def batch(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        """Record the samples of rollout ``rollout_id``, in their order."""
        self._file.append({"batch": rollout_id, "samples": [_row(sample) for sample in samples]})


def record(event: Event, groups: Iterable[Any]) -> None:
    """Record what happened to ``groups`` of samples, if this process writes a schedule."""
    if Schedule.current is not None:
        numbers = format_numbers(sample.group_index for sample in iter_samples(list(groups)))
        Schedule.current._file.append({"event": event, "groups": numbers})


def _row(sample: Sample) -> list[Any]:
    crc = zlib.crc32(array("i", sample.tokens).tobytes())
    row = [sample.group_index, sample.index, crc, _parts(sample)]
    failure = sample.metadata.get("failure")
    return row if failure is None else [*row, failure["boundary"]]


def _parts(sample: Sample) -> list[list[int | None]]:
    parts = parts_of(sample)
    if parts and parts[-1][1] == sample.response_length:
        return parts
    # A user's function made it: its requests are known by their versions only.
    versions = dict.fromkeys(map(str, sample.weight_versions))
    numbers = [int(version) if version.isdecimal() else None for version in versions] or [None]
    return [[number, sample.response_length] for number in numbers]


def read_schedule(path: Path) -> dict[int, list[Planned]]:
    """Rollout -> its samples.

    Raises:
        DataError: no schedule.
    """
    batches: dict[int, list[Planned]] = {}
    for line in _lines(path):
        if "batch" in line:
            rows = line["samples"]
            batches[line["batch"]] = [
                Planned(group, index, crc, tuple((part[0], part[1]) for part in parts), *failed)
                for group, index, crc, parts, *failed in rows
            ]
        elif line.get("event") == "begin":
            batches = {rollout: rows for rollout, rows in batches.items() if rollout < line["rollout"]}
    return batches


def read_begun(path: Path) -> dict[int, Sample]:
    """Index -> a recorded sample whose first parts the weights of this run cannot generate."""
    samples = [Sample.from_dict(line["begun"]) for line in _lines(path) if "begun" in line]
    return {int(sample.index or 0): sample for sample in samples}


@dataclass(frozen=True)
class Weights:
    """The weights of one version.

    Attributes:
        hash: of all tensors.
        names: of the tensors.
        digits: 8 hex digits per tensor, in this order. A model of 1T parameters has 70,000 tensors.
    """

    hash: str
    names: Sequence[str]
    digits: str

    @property
    def tensors(self) -> dict[str, str]:
        each = (self.digits[place : place + _DIGITS] for place in range(0, len(self.digits), _DIGITS))
        return dict(zip(self.names, each, strict=True))

    def first_difference(self, other: Weights) -> str | None:
        """The first tensor that differs, or that only one side has."""
        if self.hash == other.hash:
            return None
        mine, theirs = self.tensors, other.tensors
        names = [*mine, *(name for name in theirs if name not in mine)]
        return next((name for name in names if mine.get(name) != theirs.get(name)), "a tensor with equal first digits")


class WeightHistory:
    """The writing end of ``weights.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineFile(path)
        self._names: list[str] | None = None
        self._known: dict[int, Weights] = {}

    def begin(self, first: int, newest: int) -> None:
        """Record a start of the run, which makes the versions ``first`` to ``newest`` of an earlier start again."""
        self._known = {version: each for version, each in read_weights(self._path, first).items() if version <= newest}
        self._file.append({"event": "begin", "version": newest})

    def add(self, version: int, content: str, tensors: Mapping[str, str]) -> str | None:
        """Record a version. Returns the first tensor that differs if an earlier start of the run had it otherwise.

        After such a difference nothing is compared any more: all later versions differ as well.
        """
        if list(tensors) != self._names:
            self._names = list(tensors)
            self._file.append({"names": self._names})
        # cut: they only serve to name a tensor
        now = Weights(content, self._names, "".join(checksum[:_DIGITS] for checksum in tensors.values()))
        self._file.append({"version": version, "hash": content, "tensors": now.digits})
        before = self._known.pop(version, now)
        difference = before.first_difference(now)
        if difference is not None:
            self._known.clear()
        return difference


def read_weights(path: Path, first: int = 0) -> dict[int, Weights]:
    """Version -> its weights, from version ``first`` on. Raises as :func:`read_schedule`."""
    names: list[str] = []
    versions: dict[int, Weights] = {}
    for line in _lines(path):
        if "names" in line:
            names = line["names"]
        elif line.get("event") == "begin":
            versions = {version: each for version, each in versions.items() if version <= line["version"]}
        elif line["version"] >= first:
            versions[line["version"]] = Weights(line["hash"], names, line["tensors"])
    return versions


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # a run that is killed leaves at most one torn line, the last one
                    yield json.loads(line)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: a run records its schedule and its weights with --deterministic-mode only."
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}: restore it, or record another run.") from None
