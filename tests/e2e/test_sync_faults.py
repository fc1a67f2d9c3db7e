"""The faults of a weight sync, injected into real engines one at a time: each is refused, and named, at its sync.

weights     ``FAULTS`` and the tests below
adapters    not delivered, stale, wrong scale, delivered but not used: ``tests/e2e/test_engine_adapters.py``
vision      a tower that keeps older weights: the last test below
drafts      a prediction layer that the draft did not get: ``tests/unit/weight_sync/test_root_hash.py``, because no
            engine on a CPU serves a draft
quantized   none: SGLang's layers need a GPU or sgl_kernel. The root hash leaves such tensors to the canary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.tiny.vision import make_vision_model
from slime.backends import Canary, EngineInfo
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.utils.errors import EngineError
from slime.weight_sync import send_tensor
from slime.weight_sync.chunks import WeightChunk, chunk_of
from slime.weight_sync.probe import probe_ids, verify_canary
from slime.weight_sync.root_hash import RootProof, places_of
from slime.weight_sync.session import WeightUpdate, push_weights
from tests.e2e.engines import LocalFleet, assert_all_compared, make_engine, proof_of

pytestmark = pytest.mark.e2e

Tensors: TypeAlias = dict[str, torch.Tensor]
DOWN, GATE, UP = (f"model.layers.1.mlp.{module}_proj.weight" for module in ("down", "gate", "up"))
OUT = "model.layers.0.self_attn.o_proj.weight"


class Trainer:
    """A model of transformers that moves with every step. ``versions`` has its weights by version."""

    def __init__(self, path: str, kind: Any = AutoModelForCausalLM) -> None:
        self.path = path
        self.model = kind.from_pretrained(path, dtype=torch.float32)
        self._text = self.model.config.get_text_config()
        self.versions: list[Tensors] = []

    @torch.no_grad()
    def step(self) -> None:
        generator = torch.Generator().manual_seed(len(self.versions))
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        state = self.model.state_dict()
        if self._text.tie_word_embeddings:
            del state["lm_head.weight"]
        self.versions.append({name: each.clone() for name, each in state.items()})

    @property
    def version(self) -> str:
        return str(len(self.versions) - 1)

    @torch.no_grad()
    def canary(self) -> Canary:
        ids = probe_ids(self._text.vocab_size)
        rows = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        scores = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return Canary(self.version, ids, scores[-(len(ids) // 2) :], tolerance=0.01)


Damage: TypeAlias = Callable[[Tensors, list[Tensors]], Tensors]
"""(new tensors, those of all versions) -> the tensors that arrive."""


@dataclass
class Sender:
    """Sends through shared memory, to every rank by itself.

    Attributes:
        damages: (engine, rank) -> fault. Others get everything.
    """

    fleet: LocalFleet
    versions: list[Tensors]
    damages: dict[tuple[int, int], Damage] = field(default_factory=dict)

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        for index, engine in enumerate(self.fleet.engines):
            texts, held = [], []
            for rank in range(engine.num_gpus):
                damage = self.damages.get((index, rank), lambda tensors, versions: tensors)
                new = {name: tensor.clone() for name, tensor in chunk.tensors}
                part = chunk_of(damage(new, self.versions).items())
                held.append(send_tensor.shareable(part))
                texts += send_tensor.payloads(part, [send_tensor.handle_of(held[-1])])
            self.fleet.handles[index].update_weights_from_tensor(texts, weight_version=weight_version)

    def finish(self) -> None: ...

    def disconnect(self) -> None: ...


@pytest.fixture(scope="module")
def fleet(tiny_task: Any, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    """An engine of one rank, and one of two."""
    root = tmp_path_factory.mktemp("engines")
    engines = [make_engine(tiny_task, fork_server, root / f"{size}.log", tp_size=size) for size in (1, 2)]
    fleet = LocalFleet(engines, [EngineInfo(engine.url, size) for engine, size in zip(engines, (1, 2), strict=True)])
    try:
        for starting in [fleet.pool.submit(engine.start) for engine in engines]:
            starting.result()
        yield fleet
    finally:
        for engine in engines:
            engine.stop()


@dataclass
class Run:
    """Engines and a trainer whose syncs are proved."""

    fleet: LocalFleet
    trainer: Trainer
    proof: RootProof
    before: Canary | None = None

    def sync(self, **damages: Damage) -> None:
        """Send the weights and let both sides score the canary.

        Args:
            damages: ``e1r0=...`` is a fault on rank 0 of engine 1.
        """
        self.trainer.step()
        faults = {(int(place[1]), int(place[3])): damage for place, damage in damages.items()}
        update = WeightUpdate(self.trainer.version, 1 << 30, 60.0, proof=self.proof)
        sender = Sender(self.fleet, self.trainer.versions, faults)
        root = self.proof.begin(places_of(self.fleet.engines, (), 0))
        push_weights(self.fleet, sender, self.trainer.versions[-1].items(), update, root=root)
        self.prove()

    def prove(self) -> None:
        canary = self.trainer.canary()
        verify_canary(self.fleet, canary, 60.0, self.before)
        self.before = canary


@pytest.fixture(scope="module")
def trainer(tiny_task: Any) -> Trainer:
    return Trainer(tiny_task.model)


@pytest.fixture
def run(fleet: LocalFleet, trainer: Trainer) -> Run:
    return synced(fleet, trainer)


def synced(fleet: LocalFleet, trainer: Trainer) -> Run:
    """After two good syncs, the first of which is version 0 of the run's proof."""
    run = Run(fleet, trainer, proof_of(trainer.path))
    trainer.versions.clear()
    for _ in range(2):
        run.sync()
    for handle in fleet.handles:
        assert_all_compared(handle, run.proof)
    return run


def swap(new: Tensors, versions: list[Tensors]) -> Tensors:
    return new | {GATE: new[UP], UP: new[GATE]}


def transpose(new: Tensors, versions: list[Tensors]) -> Tensors:
    return new | {OUT: new[OUT].t().contiguous().view(new[OUT].shape)}


def scale(new: Tensors, versions: list[Tensors]) -> Tensors:
    return new | {DOWN: 2 * new[DOWN]}


def flip(new: Tensors, versions: list[Tensors]) -> Tensors:
    new[DOWN].view(torch.int32)[3, 5] ^= 1
    return new


def drop(new: Tensors, versions: list[Tensors]) -> Tensors:
    return {name: tensor for name, tensor in new.items() if name != DOWN}


def cut(new: Tensors, versions: list[Tensors]) -> Tensors:
    return dict(list(new.items())[: len(new) // 2])


def stay(new: Tensors, versions: list[Tensors]) -> Tensors:
    return versions[-2]


def restart(new: Tensors, versions: list[Tensors]) -> Tensors:
    return versions[0]


FAULTS: dict[str, tuple[dict[str, Damage], int, str]] = {
    "a rank is stale": ({"e1r1": stay}, 1, "rank 1 of 2: {all} of {all} tensors are still those of version 1"),
    "a tensor is not loaded": (
        {"e0r0": drop},
        0,
        f"1 of {{all}} tensors are still those of version 1, the first is {DOWN}",
    ),
    "gate and up are swapped": ({"e0r0": swap}, 0, "the first is model.layers.1.mlp.gate_up_proj.weight"),
    "a tensor is transposed": (
        {"e0r0": transpose},
        0,
        f"1 of {{all}} tensors differ from the trainer's, the first is {OUT}",
    ),
    "a tensor has another scale": (
        {"e1r0": scale},
        1,
        f"1 of {{all}} tensors differ from the trainer's, the first is {DOWN}",
    ),
    "one bit has flipped": ({"e0r0": flip}, 0, f"1 of {{all}} tensors differ from the trainer's, the first is {DOWN}"),
    "half of a bucket is lost": ({"e0r0": cut}, 0, "tensors are still those of version 1, the first is"),
    "one engine was missed": ({"e0r0": stay}, 0, "The rank took the version but no weights"),
    "an engine serves the first version": ({"e1r0": restart, "e1r1": restart}, 1, "are still those of version 0"),
    "all took the version only": ({"e0r0": stay, "e1r0": stay, "e1r1": stay}, 0, "no weights. 2 more ranks differ"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_weights_is_named_at_its_sync(fault: str, run: Run) -> None:
    damages, engine, expected = FAULTS[fault]
    with pytest.raises(EngineError) as caught:
        run.sync(**damages)
    text, count = str(caught.value), len(run.fleet.handles[0].rank_checksums()[0][1])
    assert text.startswith("weight version 2 (root ")
    assert f"engine {run.fleet.handles[engine].url}, rank " in text
    assert expected.format(all=count) in text


def test_the_canary_finds_weights_that_were_not_compared(run: Run) -> None:
    run.proof.verify = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"log-probs differ .* at token \d+ .* They are those of version 1\."):
        run.sync(e0r0=stay)


def test_a_prefix_cache_that_was_not_flushed_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = run.fleet.handles[0]
    monkeypatch.setattr(narrow, "flush_cache", lambda **_: None)
    with pytest.raises(EngineError, match=rf"engine {narrow.url}, .* tokens of the canary came from the prefix cache"):
        run.sync()


def test_an_engine_that_returns_to_an_older_version_is_named(run: Run) -> None:
    wide = run.fleet.handles[1]
    run.sync()
    wide.flush_cache(timeout_s=300.0)
    run.fleet.handles[0].flush_cache(timeout_s=300.0)
    wide.set_weight_version("default")
    with pytest.raises(EngineError, match=rf"engine {wide.url}, .* answers the canary with version default"):
        run.prove()


def keep_tower(new: Tensors, versions: list[Tensors]) -> Tensors:
    return new | {name: tensor for name, tensor in versions[-2].items() if ".visual." in name}


def test_a_vision_tower_that_keeps_older_weights_is_named(fork_server: ForkServer, tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "model")
    from transformers import AutoModelForImageTextToText  # the class needs the preparation of make_vision_model()

    engine = make_engine(SimpleNamespace(model=model), fork_server, tmp_path / "engine.log")
    try:
        engine.start()
        run = synced(LocalFleet([engine], [EngineInfo(engine.url, 1)]), Trainer(model, AutoModelForImageTextToText))
        tower = sum(name.startswith("visual.") for name in engine.rank_checksums()[0][1])
        with pytest.raises(EngineError, match=rf"{tower} of \d+ tensors are still those of version 1, .* visual\."):
            run.sync(e0r0=keep_tower)
        run.before = None
        run.sync()
    finally:
        engine.stop()
