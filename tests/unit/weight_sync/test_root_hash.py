"""One root hash per version: every difference between trainer and engines is named, and nothing else is refused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from slime.backends import Canary, EngineInfo, NamedTensor, Piece, Place
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

    def cuts(self, places: Sequence[Place]) -> Any:
        return lambda name, tensor: self.pieces(name, tensor, places)

    def pieces(self, name: str, tensor: torch.Tensor, places: Sequence[Place]) -> Iterator[Piece]:
        for place in places:
            yield Piece(name, ((place,),), 0, tensor.chunk(place.size)[place.rank][None])

    def hash(self, num_shares: int) -> Any:
        return Plain()

    def digests(self, hashes: Sequence[Any]) -> list[list[str]]:
        return [[each.digest()] for each in hashes]


class Plain:
    needs_order = True

    def __init__(self) -> None:
        self.content = b""

    def add(self, tensor: torch.Tensor, order: int | None = None) -> None:
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
        self.missing = 0

    def take(self, named: list[NamedTensor]) -> None:
        for engine in self.engines:
            for rank in range(engine.num_gpus):
                self.parts.setdefault((engine.url, rank), {}).update(held(named, Place(rank, engine.num_gpus, 1)))

    def start(self, verb: str, each: Any = None, **kwargs: Any) -> Any:
        done = super().start(verb, each, **kwargs)
        if verb == "rank_checksums":
            done.results = [
                [(rank, self.parts[engine.url, rank]) for rank in range(max(1, engine.num_gpus - self.missing))]
                for engine in self.engines
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
        assert f"engines of {ranks} ranks: only the canary compares model.layers.*.up, which" in caplog.text
    assert proof.compared(Place(0, 1, 1)) == {"embed", *(name for name in LAYERS if name.endswith("down"))}
    take(1)
    fleet.parts["http://wide", 0]["model.layers.0.down"] = "x"
    with pytest.raises(EngineError, match=r"differ from the trainer.s, the first is model\.layers\.0\.down"):
        sync(fleet, proof, "1", weights(1))


@pytest.mark.parametrize("excuses", ["none", "layers"])
def test_a_difference_that_is_no_pattern_is_a_fault_at_the_first_sync_too(fleet: Fleet, excuses: Any) -> None:
    fleet.take(weights(0))
    for parts in fleet.parts.values():
        parts["embed"] = "x"
        parts.update({name: "y" for name in LAYERS if name.endswith("up")})
    with pytest.raises(EngineError, match="4 of 7 tensors differ"):
        sync(fleet, RootProof(Halves(), excuses=excuses), "0", weights(0))


PREDICTION = ["model.layers.3.eh_proj", "model.layers.3.o_proj"]


def draft(fleet: Fleet, seed: int, *, arranged: str) -> list[NamedTensor]:
    """Engines take all weights; a draft has them under other names, ``o_proj`` as in the trainer, and an embedding.

    Args:
        arranged: checksum of ``eh_proj``, which the draft lays out in another way.
    """
    named = weights(seed, [*NAMES, *(f"draft.{name}" for name in PREDICTION)])
    fleet.take(named[: len(NAMES)])
    for (url, rank), parts in fleet.parts.items():
        size = next(engine.num_gpus for engine in fleet.engines if engine.url == url)
        own = held(named, Place(rank, size, 1))
        parts |= {"draft.model.embed": parts["embed"], "draft.model.out": own[f"draft.{PREDICTION[1]}"]}
        parts["draft.model.eh_proj"] = arranged
    return named


@pytest.fixture
def drafted(fleet: Fleet) -> RootProof:
    """After two good syncs of engines with drafts."""
    proof = RootProof(Halves())
    for version in (0, 1):
        sync(fleet, proof, str(version), draft(fleet, version, arranged=f"a{version}"))
    return proof


def test_the_tensors_of_a_draft_are_looked_up_by_their_content(fleet: Fleet, drafted: RootProof) -> None:
    named = draft(fleet, 2, arranged="a2")
    fleet.parts["http://wide", 1]["draft.model.out"] = "old"
    match = (
        r"wide, rank 1 of 2: the draft has other weights. 1 of 1 tensors of the trainer's prediction layer are not "
        r"among its 3 tensors, the first is model.layers.3.o_proj\."
    )
    with pytest.raises(EngineError, match=match):
        sync(fleet, drafted, "2", named)
    sync(fleet, drafted, "2", draft(fleet, 2, arranged="a2"))


def test_a_draft_that_stays_as_it_was_is_named_although_its_embedding_is_that_of_the_model(
    fleet: Fleet, drafted: RootProof
) -> None:
    match = (
        r"wide, rank 0 of 2: the draft was not updated. 1 tensors of the trainer have changed since version 1, the "
        r"first is model.layers.3.eh_proj, and none of the engine's 1"
    )
    with pytest.raises(EngineError, match=match):
        sync(fleet, drafted, "2", draft(fleet, 2, arranged="a1"))


def arrange(fleet: Fleet, seed: int, content: str) -> None:
    """Engines take all weights, but lay out embedding and ``up`` in a way that no rule knows."""
    fleet.take(weights(seed))
    for parts in fleet.parts.values():
        parts |= {name: content + name for name in LAYERS if name.endswith("up")} | {"embed": content}


def test_engines_that_no_rule_was_tested_on_may_lay_out_single_tensors_in_another_way(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    proof, names = RootProof(Halves(), excuses="any"), [*NAMES, "norm", "head"]
    for seed in (0, 1):
        arrange(fleet, seed, f"other {seed}")
        fleet.take(weights(seed, names)[-2:])
        with caplog.at_level(logging.WARNING):
            sync(fleet, proof, str(seed), weights(seed, names))
    assert "engines of 2 ranks: only the canary compares embed, model.layers.*.up, which" in caplog.text
    assert caplog.text.count("only the canary") == 2
    arrange(fleet, 2, "other 2")
    fleet.take(weights(2, names)[-2:])
    fleet.parts["http://wide", 1] |= {
        name: "other 1" + name * (name != "embed") for name in NAMES if name == "embed" or name.endswith("up")
    }
    match = (
        r"wide, rank 1 of 2: tensors that are laid out in another way than expected were not updated\. 4 tensors of "
        r"the trainer have changed since version 1, the first is embed, and none of the engine's 4"
    )
    with pytest.raises(EngineError, match=match):
        sync(fleet, proof, "2", weights(2, names))


def test_a_first_comparison_that_fails_decides_nothing(fleet: Fleet) -> None:
    proof, names = RootProof(Halves(), excuses="any"), [*NAMES, "norm", "head"]
    arrange(fleet, 0, "other")
    fleet.take([(name, torch.ones(4, 2)) for name in names[-2:]])
    fleet.parts["http://narrow", 0] |= held(weights(0, names), Place(0, 1, 1))
    with pytest.raises(EngineError, match="wide, rank 0 of 2: 6 of 9 tensors differ"):
        sync(fleet, proof, "0", weights(0, names))
    arrange(fleet, 0, "other")
    fleet.take(weights(0, names)[-2:])
    sync(fleet, proof, "0", weights(0, names))


def test_weights_that_did_not_arrive_are_no_other_layout(fleet: Fleet) -> None:
    fleet.take(weights(0))
    with pytest.raises(EngineError, match=r"wide, rank 0 of 2: 7 of 7 tensors differ"):
        sync(fleet, RootProof(Halves(), excuses="any"), "5", weights(5))


def test_a_rank_that_does_not_answer_is_a_fault(fleet: Fleet, proof: RootProof) -> None:
    fleet.take(weights(2))
    fleet.missing = 1
    match = r"engine http://wide has 2 ranks, and reports checksums of ranks \[0\]\. --weight-sync-proof canary"
    with pytest.raises(EngineError, match=match):
        sync(fleet, proof, "2", weights(2))


class Sized(Plain):
    """A hash that takes parts of equal sizes in any order."""

    needs_order = False

    def add(self, tensor: torch.Tensor, order: int | None = None) -> None:
        data = tensor.numpy().tobytes()
        begin = (order or 0) * len(data)
        self.content = self.content[:begin].ljust(begin, b"0") + data + self.content[begin + len(data) :]


class Experts(Halves):
    """Number of the expert -> part of one tensor."""

    def pieces(self, name: str, tensor: torch.Tensor, places: Sequence[Place]) -> Iterator[Piece]:
        yield Piece("experts", (tuple(places),), int(name), tensor[None], is_equal=True)

    def hash(self, num_shares: int) -> Any:
        return Sized()


@pytest.mark.parametrize(("order", "is_whole"), [((2, 0, 1), True), ((2, 0), False)])
def test_parts_of_equal_sizes_are_hashed_in_any_order_and_a_missing_one_is_noticed(
    order: tuple[int, ...], is_whole: bool
) -> None:
    tensors, place = torch.randn(3, 4), Place(0, 1, 1)
    root = RootHash(Experts(), [place])
    list(root.watch((str(number), tensors[number]) for number in order))
    expected = hashlib.sha256(tensors.numpy().tobytes()).hexdigest()[:8] if is_whole else "incomplete"
    assert root.checksums() == {place: {"experts": expected}}


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
        def pieces(self, name: str, tensor: torch.Tensor, places: Sequence[Place]) -> Iterator[Piece]:
            raise ValueError("no such slice")

    fleet, proof = Fleet(NARROW), RootProof(Broken())
    with pytest.raises(EngineError, match="could not be computed: no such slice"):
        sync(fleet, proof, "0", weights(0))
    assert fleet.verbs.count("send") == 1
    assert fleet.verbs[-2:] == ["end_weight_update", "continue_generation"]


def ask_canary(before: Canary | None = None, **answer: Any) -> None:
    canary = Canary("4", [5, 6, 7, 8, 9, 10], [-1.0, -2.0, -3.0], tolerance=0.01)
    held = {"scores": [-1.001, -2.001, -9.0], "cached": 0, "version": "4"} | answer
    fleet = RecordingFleet([NARROW], canary=lambda token_ids: [held])
    verify_canary(fleet, canary, 5.0, before)  # type: ignore[arg-type]


def test_the_canary_forgives_a_single_token_and_an_engine_that_makes_a_part_of_a_response() -> None:
    ask_canary()
    fleet = RecordingFleet([NARROW], canary=[])
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
