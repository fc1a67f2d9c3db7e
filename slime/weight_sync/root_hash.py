"""Proves that every rank of every engine holds the tensors of an update: one root hash per version, from both sides.

    trainer rank    export -> hash the slices of its engine ranks -> send          (source: gathers the checksums)
    engine rank     load -> hash every parameter  <- /weights_checker              (source: compares)

Each engine tensor has one checksum per rank. The root hash of a version is the SHA-256 of all of them, so two roots
are equal only if no rank of any engine differs. With ``--colocate`` a trainer rank hashes the slices of the engine
rank on its device, otherwise the source hashes those of all ranks of one engine of each layout. Tensors are hashed as
they pass: only parts of a fused tensor that arrive before their turn are kept.

The rules by which an engine lays out a tensor (``EngineTensors``) may not fit every engine: some kernels rearrange
experts, for instance. At the first comparison of a layout, a kind of tensor that differs in every layer, on every rank
and every engine is therefore left to the canary, with a warning. Nothing is excused later.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from slime.backends.protocols import DRAFT, EngineFleet, EngineInfo, EngineTensors, NamedTensor, Place, TensorHash
from slime.utils.errors import EngineError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"\.\d+\.")


Checksums: TypeAlias = Mapping[Place, Mapping[str, str]]


class RootHash:
    """The checksums of one update on one trainer rank.

    Args:
        places: engine ranks whose tensors this trainer rank hashes.
    """

    def __init__(self, tensors: EngineTensors, places: Sequence[Place]) -> None:
        self._tensors = tensors
        self._hashes: dict[Place, dict[str, _InOrder]] = {place: {} for place in places}
        self._failure: Exception | None = None
        self.num_bytes = 0

    def watch(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """``weights``, hashed as they pass."""
        for named in weights:
            if self._failure is None:
                try:
                    self._add(*named)
                except Exception as error:  # the other ranks wait: gathering the weights is a collective
                    self._failure = error
            yield named

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        for place, hashes in self._hashes.items():
            for piece in self._tensors.pieces(name, tensor.detach(), place):
                if piece.name not in hashes:
                    hashes[piece.name] = _InOrder(self._tensors.hash())
                self.num_bytes += piece.tensor.nbytes
                hashes[piece.name].add(piece.order, piece.tensor)

    def checksums(self) -> Checksums:
        """Of every tensor that has passed."""
        if self._failure is not None:
            raise self._failure
        return {place: {name: each.digest() for name, each in found.items()} for place, found in self._hashes.items()}


class _InOrder:
    """Adds the parts of a tensor in the order of their numbers."""

    def __init__(self, hasher: TensorHash) -> None:
        self._hash = hasher
        self._next = 0
        self._early: dict[int, torch.Tensor] = {}

    def add(self, order: int, tensor: torch.Tensor) -> None:
        # a copy: the exporter may use the memory again for the next bucket
        self._early[order] = tensor if order == self._next else tensor.clone()
        while self._next in self._early:
            self._hash.add(self._early.pop(self._next))
            self._next += 1

    def digest(self) -> str:
        # a missing part must differ from every checksum of the engine
        return "incomplete" if self._early else self._hash.digest()


def places_of(engines: Sequence[EngineInfo], near: Sequence[int], rank: int) -> list[Place]:
    """The engine ranks whose tensors trainer rank ``rank`` hashes: each place of the fleet is one rank's.

    Args:
        near: indices of engines on the trainer's devices.
    """
    found: dict[Place, int] = {}
    # near engines first: their ranks hash less than the source, which would hash the whole model
    for index in sorted(range(len(engines)), key=lambda index: index not in near):
        engine = engines[index]
        for number in range(engine.num_gpus):
            owner = engine.first_slot + number if index in near and engine.first_slot is not None else 0
            found.setdefault(Place(number, engine.num_gpus, engine.expert_blocks), owner)
    return [place for place, owner in found.items() if owner == rank]


@dataclass
class RootProof:
    """Compares the engines with the trainer after every update. One per trainer rank, used in all its updates.

    Attributes:
        tensors: the engines' layout.
        is_strict: a tensor whose layout is not the expected one is an error, too.
    """

    tensors: EngineTensors
    is_strict: bool = False
    root: str = ""
    num_bytes: int = 0
    _excused: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    _versions: dict[str, Checksums] = field(default_factory=dict)
    _drafts: dict[tuple[str, int], str] = field(default_factory=dict)

    def begin(self, places: Sequence[Place]) -> RootHash:
        """The checksums of a new update."""
        return RootHash(self.tensors, places)

    def verify(self, fleet: EngineFleet, version: str, expected: Checksums, timeout_s: float) -> None:
        """Compare every rank of every engine. On the source only.

        Raises:
            EngineError: names version, engine, rank, tensors, and the version that they are from if it is known.
        """
        # all engines hash at the same time
        answers = fleet.start("rank_checksums").wait(timeout_s)
        found = [
            _Rank(engine.url, Place(rank, engine.num_gpus, engine.expert_blocks), held)
            for engine, ranks in zip(fleet.engines, answers, strict=True)
            for rank, held in ranks
        ]
        self._excuse(found, expected)
        problems = []
        for rank in found:
            wanted = self._wanted(rank.place, expected)
            wrong = [name for name, checksum in wanted.items() if rank.held.get(name) != checksum]
            if wrong:
                problems.append(self._problem(rank, wrong, len(wanted)))
            elif problem := self._stale_draft(rank, version, expected):
                problems.append(problem)
        if problems:
            more = f" {len(problems) - 1} more ranks differ." if len(problems) > 1 else ""
            raise EngineError(
                f"weight version {version} (root {self._root(expected)[:16]}): {problems[0]}{more} The sync is "
                "refused. --weight-sync-proof canary leaves tensors out of the comparison."
            )
        self.root = self._root(expected)
        self._remember(version, expected)
        count = sum(len(self._wanted(rank.place, expected)) for rank in found)
        logger.info("weight version %s has root %s: %d tensors of %d ranks", version, self.root, count, len(found))

    def compared(self, place: Place) -> set[str]:
        """The engine's tensors that were compared after the last update."""
        last = next(reversed(self._versions.values()), {})
        return set(self._wanted(place, last))

    def _wanted(self, place: Place, expected: Checksums) -> dict[str, str]:
        excused = self._excused.get(place[1:], frozenset())
        return {
            name: checksum
            for name, checksum in expected.get(place, {}).items()
            if _kind(name) not in excused and not name.startswith(DRAFT)
        }

    def _root(self, expected: Checksums) -> str:
        """The root hash of ``expected``. A set of lines per layout, so the number of engines does not matter."""
        return _sha(
            sorted(
                (str(tuple(place)), name, value)
                for place in expected
                for name, value in self._wanted(place, expected).items()
            )
        )

    def _excuse(self, found: Sequence[_Rank], expected: Checksums) -> None:
        """Find the kinds of tensors that an engine seen for the first time lays out in another way."""
        for layout in {rank.place[1:] for rank in found} - set(self._excused):
            ranks = [rank for rank in found if rank.place[1:] == layout]
            kinds: dict[str, list[tuple[bool, bool]]] = {}
            for rank in ranks:
                for name, checksum in expected.get(rank.place, {}).items():
                    state = name in rank.held, rank.held.get(name) == checksum
                    kinds.setdefault(_kind(name), []).append(state)
            different = {kind for kind, states in kinds.items() if not any(equal for _, equal in states)}
            absent = {kind for kind in different if not any(held for held, _ in kinds[kind])}
            # one tensor per rank is no pattern: its difference is a fault
            layered = {kind for kind in different - absent if len(kinds[kind]) > len(ranks)}
            if self.is_strict or different - absent - layered:
                layered = set()
            if layered:
                logger.warning(
                    "engines of %d ranks, %d blocks of experts: only the canary compares %s, which such an engine lays "
                    "out in another way than expected",
                    *layout,
                    ", ".join(sorted(layered)),
                )
            # also without a finding: a later difference of this layout is a fault
            self._excused[layout] = frozenset(absent | layered)

    def _problem(self, rank: _Rank, wrong: Sequence[str], count: int) -> str:
        start = f"engine {rank.url}, rank {rank.place.rank} of {rank.place.size}: {len(wrong)} of {count} tensors "
        for version, before in reversed(self._versions.items()):
            if all(rank.held.get(name) == before.get(rank.place, {}).get(name) for name in wrong):
                what = "The rank took the version but no weights." if len(wrong) == count else "They did not arrive."
                return f"{start}are still those of version {version}, the first is {wrong[0]}. {what}"
        return f"{start}differ from the trainer's, the first is {wrong[0]}."

    def _stale_draft(self, rank: _Rank, version: str, expected: Checksums) -> str | None:
        """A draft that did not change although the trainer's prediction layer did."""
        held = sorted(item for item in rank.held.items() if item[0].startswith(DRAFT))
        mine = {name: each for name, each in expected.get(rank.place, {}).items() if name.startswith(DRAFT)}
        if not held or not mine:
            return None
        key, now = (rank.url, rank.place.rank), _sha(held)
        before, self._drafts[key] = self._drafts.get(key), now
        last = next(reversed(self._versions), None)
        if last in (None, version) or before != now:
            return None
        earlier = self._versions[last].get(rank.place, {})
        changed = [name for name, checksum in mine.items() if earlier.get(name, checksum) != checksum]
        if not changed:
            return None
        return (
            f"engine {rank.url}, rank {rank.place.rank} of {rank.place.size}: the draft was not updated. "
            f"{len(changed)} tensors of the trainer's prediction layer have changed since version {last}, the first is "
            f"{changed[0].removeprefix(DRAFT + '.')}, and none of the draft's {len(held)} tensors."
        )

    def _remember(self, version: str, expected: Checksums) -> None:
        """Keep the checksums of the first version, which a restarted engine may serve, and of the last one."""
        # two only: the checksums of a large engine are megabytes of text
        first = next(iter(self._versions), version)
        self._versions = {first: self._versions.get(first, expected), version: expected}


class _Rank(NamedTuple):
    """One rank's answer: engine tensor name -> checksum."""

    url: str
    place: Place
    held: Mapping[str, str]


def _sha(lines: Iterable[tuple[str, ...]]) -> str:
    return hashlib.sha256("".join(" ".join(line) + "\n" for line in lines).encode()).hexdigest()


def _kind(name: str) -> str:
    """The name without layer numbers."""
    return _LAYER.sub(".*.", name)
