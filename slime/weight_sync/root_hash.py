"""Proves that every rank of every engine holds the tensors of an update: one root hash per version, from both sides.

    trainer rank    export -> hash the slices of its engine ranks -> send          (source: gathers the checksums)
    engine rank     load -> hash every parameter  <- /weights_checker              (source: compares)

Each engine tensor has one checksum per rank. The root hash of a version is the SHA-256 of all of them, so two roots
are equal only if no rank of any engine differs. With ``--colocate`` a trainer rank hashes the slices of the engine
rank on its device, otherwise the source hashes those of all ranks of one engine of each layout, equal ones once.
Tensors are hashed as they pass: only parts of a fused tensor that arrive before their turn are kept.

The rules by which an engine lays out a tensor (``EngineTensors``) may not fit every engine: some kernels rearrange
experts, for instance. At the first comparison of a layout, a kind of tensor that differs in every layer, on every rank
and every engine is therefore left to the canary, with a warning. Later a rank is still refused if none of these tensors
has changed although the trainer's have. Nothing is excused later.

A prediction layer has other names in an engine's draft, so there its checksums are looked up by their values.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from slime.backends import (
    DRAFT,
    EngineFleet,
    EngineInfo,
    EngineTensors,
    NamedTensor,
    Piece,
    Place,
    TensorHash,
)
from slime.utils.errors import EngineError, kept

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"\.\d+\.")


_FIX = "--weight-sync-proof canary leaves tensors out of the comparison."

_Layout: TypeAlias = tuple[int, ...]
"""A place without its rank."""

Checksums: TypeAlias = Mapping[Place, Mapping[str, str]]


class RootHash:
    """The checksums of one update on one trainer rank.

    Args:
        places: engine ranks whose tensors this trainer rank hashes.
    """

    def __init__(self, tensors: EngineTensors, places: Sequence[Place]) -> None:
        self._tensors = tensors
        self._places = places
        self._pieces = tensors.cuts(places)
        self._hashes: dict[tuple[str, tuple[tuple[Place, ...], ...]], _Parts] = {}
        self._failure: Exception | None = None

    def watch(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """``weights``, hashed as they pass."""
        for named in weights:
            if self._failure is None:
                errors: list[Exception] = []
                with kept(errors):  # the other ranks wait: gathering the weights is a collective
                    self._add(*named)
                self._failure = errors[0] if errors else None
            yield named

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if not self._places:
            return
        for piece in self._pieces(name, tensor.detach()):
            key = piece.name, piece.shares
            if key not in self._hashes:
                self._hashes[key] = _Parts(self._tensors.hash(len(piece.shares)))
            self._hashes[key].add(piece)

    def checksums(self) -> Checksums:
        """Of every tensor that has passed."""
        if self._failure is not None:
            raise self._failure
        found: dict[Place, dict[str, str]] = {place: {} for place in self._places}
        digests = self._tensors.digests([parts.hash for parts in self._hashes.values()])
        for ((name, shares), parts), each in zip(self._hashes.items(), digests, strict=True):
            for group, digest in zip(shares, each, strict=True):
                for place in group:
                    # a missing part must differ from every checksum of the engine
                    found[place][name] = digest if parts.is_complete else "incomplete"
        return found


class _Parts:
    """Adds the parts of a tensor, in the order of their numbers where the hash needs it."""

    def __init__(self, hasher: TensorHash) -> None:
        self.hash = hasher
        self._count = 0
        self._last = -1
        self._early: dict[int, torch.Tensor] = {}

    @property
    def is_complete(self) -> bool:
        return self._count == self._last + 1

    def add(self, piece: Piece) -> None:
        self._last = max(self._last, piece.order)
        if piece.is_equal and not self.hash.needs_order:
            self.hash.add(piece.tensor, piece.order)
            self._count += 1
            return
        # a copy: the exporter may use the memory again for the next bucket
        self._early[piece.order] = piece.tensor if piece.order == self._count else piece.tensor.clone()
        while self._count in self._early:
            self.hash.add(self._early.pop(self._count))
            self._count += 1


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
            found.setdefault(engine.place(number), owner)
    return [place for place, owner in found.items() if owner == rank]


@dataclass
class RootProof:
    """Compares the engines with the trainer after every update. One per trainer rank, used in all its updates.

    Attributes:
        tensors: the engines' layout.
        excuses: the kinds of tensors that may have another layout at the first comparison: those of all layers, any,
            or none. A single tensor that differs is more often a fault, unless the rules have not met such engines.
    """

    tensors: EngineTensors
    excuses: Literal["none", "layers", "any"] = "layers"
    root: str = ""
    _excused: dict[_Layout, frozenset[str]] = field(default_factory=dict)
    _drafted: dict[_Layout, frozenset[str]] = field(default_factory=dict)
    _versions: dict[str, Checksums] = field(default_factory=dict)
    _seen: dict[tuple[str, int, str], str] = field(default_factory=dict)
    _before: dict[tuple[str, int, str], str] = field(default_factory=dict)  # _seen at the last good comparison

    def begin(self, places: Sequence[Place]) -> RootHash:
        """The checksums of a new update."""
        return RootHash(self.tensors, places)

    def verify(self, fleet: EngineFleet, version: str, expected: Checksums, timeout_s: float) -> None:
        """Compare every rank of every engine. On the source only.

        Raises:
            EngineError: names version, engine, rank, tensors, and the version that they are from if it is known.
        """
        found = self._ask(fleet, version, timeout_s)
        known = set(self._excused)
        self._judge_layouts(found, expected)
        problems = []
        self._seen = {}
        for rank in found:
            wanted = self._wanted(rank.place, expected)
            wrong = [name for name, checksum in wanted.items() if rank.held.get(name) != checksum]
            if wrong:
                problems.append(self._problem(rank, wrong, len(wanted)))
            else:
                problems += self._stale(rank, version, expected)
        if problems:
            for layout in set(self._excused) - known:  # what a fault looks like is no layout
                del self._excused[layout]
            more = f" {len(problems) - 1} more ranks differ." if len(problems) > 1 else ""
            raise EngineError(
                f"weight version {version} (root {self._root(expected)[:16]}): {problems[0]}{more} The sync is "
                f"refused. {_FIX}"
            )
        self.root = self._root(expected)
        self._before |= self._seen
        self._remember(version, expected)
        count = sum(len(self._wanted(rank.place, expected)) for rank in found)
        logger.info("weight version %s has root %s: %d tensors of %d ranks", version, self.root, count, len(found))

    def compared(self, place: Place) -> set[str]:
        """The engine's tensors that were compared after the last update."""
        last = next(reversed(self._versions.values()), {})
        return set(self._wanted(place, last))

    def _ask(self, fleet: EngineFleet, version: str, timeout_s: float) -> list[_Rank]:
        """The checksums of all ranks. All engines hash at the same time."""
        found = []
        for engine, ranks in zip(fleet.engines, fleet.start("rank_checksums").wait(timeout_s), strict=True):
            if (numbers := [rank for rank, _ in ranks]) != list(range(engine.num_gpus)):
                raise EngineError(
                    f"weight version {version}: engine {engine.url} has {engine.num_gpus} ranks, and reports checksums "
                    f"of ranks {numbers}. {_FIX}"
                )
            found += [_Rank(engine.url, engine.place(rank), held) for rank, held in ranks]
        return found

    def _wanted(self, place: Place, expected: Checksums) -> dict[str, str]:
        excused = self._excused.get(place[1:], frozenset())
        return {
            name: checksum
            for name, checksum in expected.get(place, {}).items()
            if not name.startswith(DRAFT) and _kind(name) not in excused
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

    def _judge_layouts(self, found: Sequence[_Rank], expected: Checksums) -> None:
        """Find the tensors that engines seen for the first time lay out in another way, and those of their drafts."""
        for layout in {rank.place[1:] for rank in found} - set(self._excused):
            ranks = [rank for rank in found if rank.place[1:] == layout]
            kinds: dict[str, list[tuple[bool, bool]]] = {}
            for rank in ranks:
                for name, checksum in expected.get(rank.place, {}).items():
                    if not name.startswith(DRAFT):
                        state = name in rank.held, rank.held.get(name) == checksum
                        kinds.setdefault(_kind(name), []).append(state)
            different = {kind for kind, states in kinds.items() if not any(equal for _, equal in states)}
            absent = {kind for kind in different if not any(held for held, _ in kinds[kind])}
            excused = different - absent
            single = {kind for kind in excused if len(kinds[kind]) <= len(ranks)}
            # of weights that did not arrive most kinds differ
            is_fault = bool(single) if self.excuses == "layers" else 2 * len(excused) >= len(kinds) - len(absent)
            if self.excuses == "none" or is_fault:
                excused = set()
            unknown = {_kind(name) for rank in ranks for name in set(rank.held) - set(expected.get(rank.place, {}))}
            unknown = {kind for kind in unknown if not kind.startswith(DRAFT) and ".rotary_emb." not in kind}
            if excused or unknown:
                logger.warning(
                    "engines of %d ranks: only the canary compares %s, which they lay out in another way than expected",
                    layout[0],
                    ", ".join(sorted(excused | unknown)),
                )
            # also without a finding: a later difference of this layout is a fault
            self._excused[layout] = frozenset(absent | excused)
            drafts = [
                {name for name, checksum in _drafts(expected.get(rank.place, {})).items() if checksum in values}
                for rank in ranks
                if (values := set(_drafts(rank.held).values()))
            ]
            self._drafted[layout] = frozenset(set.intersection(*drafts) if drafts else ())

    def _problem(self, rank: _Rank, wrong: Sequence[str], count: int) -> str:
        start = f"{rank}: {len(wrong)} of {count} tensors "
        for version, before in reversed(self._versions.items()):
            if all(rank.held.get(name) == before.get(rank.place, {}).get(name) for name in wrong):
                what = "The rank took the version but no weights." if len(wrong) == count else "They did not arrive."
                return f"{start}are still those of version {version}, the first is {wrong[0]}. {what}"
        return f"{start}differ from the trainer's, the first is {wrong[0]}."

    def _stale(self, rank: _Rank, version: str, expected: Checksums) -> Iterator[str]:
        """Tensors that cannot be compared one by one, but did not change although the trainer's did."""
        mine = expected.get(rank.place, {})
        excused = self._excused[rank.place[1:]]
        names = {name for name in mine if _kind(name) in excused and name in rank.held}
        held = {name: rank.held[name] for name in names}
        what = "tensors that are laid out in another way than expected were not updated"
        if changed := self._unchanged(rank, what, version, held, names, mine):
            yield f"{rank}: {what}. {changed}"
        draft = _drafts(rank.held)
        if not draft:
            return
        known, values = self._drafted[rank.place[1:]], set(draft.values())
        if missing := sorted(name for name in known if mine[name] not in values):
            yield (
                f"{rank}: the draft has other weights. {len(missing)} of {len(known)} tensors of the trainer's "
                f"prediction layer are not among its {len(draft)} tensors, the first is {_plain(missing[0])}."
            )
            return
        # a draft has embedding and output layer of the model, which say nothing about itself
        shared = {checksum for name, checksum in rank.held.items() if name not in draft}
        shared |= {mine[name] for name in known}
        own = {name: checksum for name, checksum in draft.items() if checksum not in shared}
        what = "the draft was not updated"
        if changed := self._unchanged(rank, what, version, own, set(_drafts(mine)) - known, mine):
            yield f"{rank}: {what}. {changed}"

    def _unchanged(
        self,
        rank: _Rank,
        what: str,
        version: str,
        held: Mapping[str, str],
        names: Collection[str],
        mine: Mapping[str, str],
    ) -> str | None:
        """The trainer's tensors of ``names`` that changed if none of ``held`` did."""
        key = rank.url, rank.place.rank, what
        self._seen[key] = _sha(sorted(held.items()))
        last = next(reversed(self._versions), None)
        if not held or last in (None, version) or self._before.get(key) != self._seen[key]:
            return None
        earlier = self._versions[last].get(rank.place, {})
        changed = sorted(name for name in names if earlier.get(name, mine[name]) != mine[name])
        if not changed:
            return None
        return (
            f"{len(changed)} tensors of the trainer have changed since version {last}, the first is "
            f"{_plain(changed[0])}, and none of the engine's {len(held)}."
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

    def __str__(self) -> str:
        return f"engine {self.url}, rank {self.place.rank} of {self.place.size}"


def _sha(lines: Iterable[tuple[str, ...]]) -> str:
    return hashlib.sha256("".join(" ".join(line) + "\n" for line in lines).encode()).hexdigest()


def _kind(name: str) -> str:
    """The name without layer numbers."""
    return _LAYER.sub(".*.", name)


def _drafts(named: Mapping[str, str]) -> dict[str, str]:
    return {name: checksum for name, checksum in named.items() if name.startswith(DRAFT)}


def _plain(name: str) -> str:
    return name.removeprefix(f"{DRAFT}.")
