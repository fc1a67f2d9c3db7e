"""One root hash per version: every difference between trainer and engines is named, and nothing else is refused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slime.backends.protocols import Canary, EngineInfo, NamedTensor, Piece, Place
from slime.utils.errors import EngineError
from slime.weight_sync.probe import verify_canary
from slime.weight_sync.root_hash import RootHash, RootProof, places_of
from slime.weight_sync.session import WeightUpdate, push_weights
from tests.unit.weight_sync.fakes import RecordingFleet, RecordingSender

WIDE, NARROW = EngineInfo("http://wide", 2), EngineInfo("http://narrow", 1)
LAYERS = [f"model.layers.{number}.{module}" for number in range(3) for module in ("up", "down")]
NAMES = ["embed", *LAYERS]


class Halves:
    """Engines whose ranks hold equal parts of the rows, and tensors of prediction layers under another name."""

    def pieces(self, name: str, tensor: torch.Tensor, place: Place) -> Iterator[Piece]:
        yield Piece(name, 0, tensor.chunk(place.size)[place.rank])

    def hash(self) -> Any:
        return Plain()


class Plain:
    def __init__(self) -> None:
        self.content = b""

    def add(self, tensor: torch.Tensor) -> None:
        self.content += tensor.contiguous().numpy().tobytes()

    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:8]


def weights(seed: int, names: list[str] = NAMES) -> list[NamedTensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(4, 2, generator=generator)) for name in names]


def held(named: list[NamedTensor], place: Place) -> dict[str, str]:
    root = RootHash(Halves(), [place])
    list(root.watch(named))
    return dict(root.checksums()[place])


class Fleet(RecordingFleet):
    """Engines that hold ``parts``: (engine, rank) -> tensor -> checksum."""

    def __init__(self, *engines: EngineInfo) -> None:
        super().__init__(engines)
        self.parts: dict[tuple[str, int], dict[str, str]] = {}

    def take(self, named: list[NamedTensor]) -> None:
        for engine in self.engines:
            for rank in range(engine.num_gpus):
                self.parts.setdefault((engine.url, rank), {}).update(held(named, Place(rank, engine.num_gpus, 1)))

    def start(self, verb: str, each: Any = None, **kwargs: Any) -> Any:
        done = super().start(verb, each, **kwargs)
        if verb == "rank_checksums":
            done.results = [
                [(rank, self.parts[engine.url, rank]) for rank in range(engine.num_gpus)] for engine in self.engines
            ]
        return done


def sync(fleet: Fleet, proof: RootProof, version: str, named: list[NamedTensor]) -> None:
    root = proof.begin(places_of(fleet.engines, (), 0))
    fleet.version = version
    push_weights(fleet, RecordingSender(fleet), named, WeightUpdate(version, 1 << 20, 5.0, proof=proof), root=root)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(WIDE, NARROW)


@pytest.fixture
def proof(fleet: Fleet) -> RootProof:
    """After two good syncs."""
    proof = RootProof(Halves())
    for version in (0, 1):
        fleet.take(weights(version))
        sync(fleet, proof, str(version), weights(version))
    return proof


def test_a_root_depends_on_the_weights_and_not_on_the_number_of_engines(fleet: Fleet, proof: RootProof) -> None:
    more, other = Fleet(WIDE, NARROW, EngineInfo("http://third", 1)), RootProof(Halves())
    more.take(weights(1))
    sync(more, other, "9", weights(1))
    assert other.root == proof.root
    fleet.take(weights(2))
    sync(fleet, proof, "2", weights(2))
    assert proof.root != other.root


def test_a_stale_rank_is_named_with_the_version_that_it_holds(fleet: Fleet, proof: RootProof) -> None:
    before = dict(fleet.parts["http://wide", 1])
    fleet.take(weights(2))
    fleet.parts["http://wide", 1] = before
    text = (
        r"weight version 2 \(root [0-9a-f]{16}\): engine http://wide, rank 1 of 2: 7 of 7 tensors are still those of "
        r"version 1, the first is embed\. The rank took the version but no weights\. The sync is refused"
    )
    with pytest.raises(EngineError, match=text):
        sync(fleet, proof, "2", weights(2))
    assert fleet.verbs[-1] == "continue_generation"


def test_a_tensor_that_did_not_arrive_and_one_that_changed_on_the_way_are_named(fleet: Fleet, proof: RootProof) -> None:
    before = fleet.parts["http://narrow", 0][LAYERS[3]]
    fleet.take(weights(2))
    fleet.parts["http://narrow", 0][LAYERS[3]] = before
    match = f"narrow, rank 0 of 1: 1 of 7 tensors are still those of version 1, the first is {LAYERS[3]}"
    with pytest.raises(EngineError, match=match):
        sync(fleet, proof, "2", weights(2))
    fleet.parts["http://narrow", 0][LAYERS[3]] = "00000000"
    with pytest.raises(EngineError, match=f"1 of 7 tensors differ from the trainer's, the first is {LAYERS[3]}"):
        sync(fleet, proof, "2", weights(2))


def test_the_checkpoint_of_a_restarted_engine_is_recognized(fleet: Fleet, proof: RootProof) -> None:
    fleet.take(weights(2))
    fleet.parts["http://narrow", 0] = held(weights(0), Place(0, 1, 1))
    with pytest.raises(EngineError, match="narrow, rank 0 of 1: 7 of 7 tensors are still those of version 0"):
        sync(fleet, proof, "2", weights(2))


def test_a_kind_of_tensor_with_another_layout_is_left_to_the_canary_at_the_first_sync_only(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    proof = RootProof(Halves())

    def take(seed: int) -> None:
        fleet.take(weights(seed))
        for parts in fleet.parts.values():
            parts.update({name: f"other {seed}" for name in LAYERS if name.endswith("up")})

    take(0)
    with caplog.at_level(logging.WARNING):
        sync(fleet, proof, "0", [*weights(0), ("lm_head", torch.ones(4, 2))])  # the engine has no separate head
    for ranks in (1, 2):
        assert (
            f"engines of {ranks} ranks, 1 blocks of experts: only the canary compares model.layers.*.up" in caplog.text
        )
    assert proof.compared(Place(0, 1, 1)) == {"embed", *(name for name in LAYERS if name.endswith("down"))}
    take(1)
    fleet.parts["http://wide", 0]["model.layers.0.down"] = "x"
    with pytest.raises(EngineError, match=r"differ from the trainer.s, the first is model\.layers\.0\.down"):
        sync(fleet, proof, "1", weights(1))


@pytest.mark.parametrize("strict", [True, False])
def test_a_difference_that_is_no_pattern_is_a_fault_at_the_first_sync_too(fleet: Fleet, strict: bool) -> None:
    fleet.take(weights(0))
    for parts in fleet.parts.values():
        parts["embed"] = "x"
        parts.update({name: "y" for name in LAYERS if name.endswith("up")})
    with pytest.raises(EngineError, match="4 of 7 tensors differ"):
        sync(fleet, RootProof(Halves(), is_strict=strict), "0", weights(0))


def test_a_draft_that_stays_as_it_was_although_the_prediction_layer_changed_is_named(fleet: Fleet) -> None:
    proof, names = RootProof(Halves()), [*NAMES, "draft.model.layers.3.eh_proj"]
    for version in (0, 1):
        fleet.take(weights(version))
        for parts in fleet.parts.values():
            parts["draft.decoder"] = str(version)
        sync(fleet, proof, str(version), weights(version, names))
    fleet.take(weights(2))
    match = (
        r"wide, rank 0 of 2: the draft was not updated. 1 tensors of the trainer's prediction layer have changed since "
        r"version 1, the first is model.layers.3.eh_proj, and none of the draft's 1 tensors"
    )
    with pytest.raises(EngineError, match=match):
        sync(fleet, proof, "2", weights(2, names))


def test_each_rank_of_an_engine_is_hashed_by_one_trainer_rank() -> None:
    near, twin = EngineInfo("a", 2, first_slot=0, expert_blocks=2), EngineInfo("b", 2, first_slot=2, expert_blocks=2)
    engines = [EngineInfo("far", 1), near, twin]
    assert [places_of(engines, (1, 2), rank) for rank in range(4)] == [
        [Place(0, 2, 2), Place(0, 1, 1)],
        [Place(1, 2, 2)],
        [],
        [],
    ]
    assert places_of(engines, (), 0) == [Place(0, 1, 1), Place(0, 2, 2), Place(1, 2, 2)]


def test_a_rank_that_cannot_hash_passes_all_weights_on_and_reports_it_at_the_end() -> None:
    class Broken(Halves):
        def pieces(self, name: str, tensor: torch.Tensor, place: Place) -> Iterator[Piece]:
            raise ValueError("no such slice")

    fleet, proof = Fleet(NARROW), RootProof(Broken())
    with pytest.raises(ValueError, match="no such slice"):
        sync(fleet, proof, "0", weights(0))
    assert fleet.verbs.count("send") == 1
    assert fleet.verbs[-2:] == ["end_weight_update", "continue_generation"]


def ask_canary(before: Canary | None = None, **answer: Any) -> None:
    canary = Canary("4", [5, 6, 7, 8, 9, 10], [-1.0, -2.0, -3.0], tolerance=0.01)
    held = {"scores": [-1.001, -2.001, -9.0], "cached": 0, "version": "4"} | answer
    fleet = RecordingFleet([NARROW], canary=lambda token_ids: held)
    verify_canary(fleet, canary, 5.0, before)  # type: ignore[arg-type]


def test_the_canary_forgives_a_single_token_and_an_engine_that_makes_a_part_of_a_response() -> None:
    ask_canary()
    fleet = RecordingFleet([NARROW], canary=None)
    verify_canary(fleet, Canary("4", [5, 6], [-1.0], 0.01), 5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"version": "3"}, "the engine answers the canary with version 3"),
        ({"cached": 3}, "3 tokens of the canary came from the prefix cache, which was not flushed"),
        (
            {"scores": [-1.5, -2.25, -3.125]},
            "by 0.25 (median, allowed 0.01) and at most 0.5, at token 3 (id 8: engine -1.5000, trainer -1.0000)",
        ),
        ({"scores": [-4.0, -4.0, -4.0]}, "They are those of version 3"),
    ],
)
def test_a_fault_of_the_canary_is_named_with_engine_and_version(answer: dict[str, Any], problem: str) -> None:
    with pytest.raises(EngineError, match=r"engine http://narrow, weight version 4: .* The sync is refused") as caught:
        ask_canary(Canary("3", [5, 6, 7, 8, 9, 10], [-4.0, -4.0, -4.0], 0.01), **answer)
    assert problem in str(caught.value)
