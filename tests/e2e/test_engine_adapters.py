"""Adapters on real servers: engines compute as peft does after every sync, and every fault of a sync is named."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from slime.backends import EVERY_RANK, AdapterProof, EngineInfo, NamedTensor, Probe, Recipients
from slime.backends.sglang_utils.feature_rules import adapter_words
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.training.arguments import LoraArgs
from slime.backends.training.hf_files import write_hf_directory
from slime.config.groups import from_args
from slime.data.engine_fields import ADAPTER_NAME, FieldFlags
from slime.models.hf_shape import read_shape
from slime.models.lora import LoraConfig
from slime.utils.errors import EngineError
from slime.weight_sync.probe import probe_ids, verify_adapter
from slime.weight_sync.send_adapter import AdapterUpdater
from slime.weight_sync.send_disk import DiskSettings, DiskUpdater
from slime.weight_sync.session import ALONE, WeightUpdate
from slime.weight_sync.updater import WeightUpdater
from tests.e2e.engines import LocalFleet, make_engine, proof_of, shared_files

pytestmark = pytest.mark.e2e

LORA = LoraConfig(rank=8, alpha=16.0, rslora=True)
ARGS = Namespace(lora_rank=8, lora_merge=False)


class PeftTrainer:
    """A trainer of one rank: a model of transformers with peft's adapters, random ones after every :meth:`step`."""

    is_weight_source = True

    def __init__(self, model: str) -> None:
        self.path = model
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.weights = {
            name: value.clone() for name, value in self.base.state_dict().items() if name != "lm_head.weight"
        }
        names = LORA.module_names(read_shape(model))
        settings = PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, use_rslora=LORA.rslora, target_modules=names)
        self.model = get_peft_model(self.base, settings)
        self.version = 0

    def step(self) -> None:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if "lora_B" in name:
                    value.copy_(torch.randn(value.shape, generator=generator) * 1e-3)

    def export_weights(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        yield from self.weights.items()

    def export_adapter(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        for name, value in self.model.named_parameters():
            if ".lora_" in name:
                yield name.removeprefix("base_model.model.").replace(".default.", "."), value.detach()

    @torch.no_grad()
    def probe(self) -> Probe:
        ids = probe_ids(self.base.config.vocab_size)

        def log_probs() -> list[float]:
            rows = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

        adapted = log_probs()
        with self.model.disable_adapter():
            return Probe(str(self.version), ids, adapted, log_probs())


class RecordingFleet(LocalFleet):
    """Records the verbs. ``changes``: verb -> a function that falsifies its arguments."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.verbs: list[str] = []
        self.changes: dict[str, Any] = {}

    def only(self, indices: Any) -> LocalFleet:
        self.verbs.append(f"only {list(indices)}")
        return super().only(indices)

    def start(self, verb: str, each: Any = None, **kwargs: Any) -> Any:
        self.verbs.append(verb)
        return super().start(verb, each, **self.changes.get(verb, lambda given: given)(kwargs))


@pytest.fixture(scope="module")
def handles(tiny_task: Any, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """An engine of one rank, and one of two."""
    root = tmp_path_factory.mktemp("engines")
    args = Namespace(
        **vars(LoraArgs(lora_rank=8, lora_alpha=16.0, lora_use_rslora=True)), hf_checkpoint=tiny_task.model
    )
    words = adapter_words(args)
    engines = [make_engine(tiny_task, fork_server, root / f"{size}.log", *words, tp_size=size) for size in (1, 2)]
    try:
        for engine in engines:
            engine.start()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture
def fleet(handles: list[Any]) -> RecordingFleet:
    return RecordingFleet(handles, [EngineInfo(handle.url, size) for handle, size in zip(handles, (1, 2), strict=True)])


@pytest.fixture(scope="module")
def trainer(tiny_task: Any) -> PeftTrainer:
    return PeftTrainer(tiny_task.model)


@pytest.fixture
def updater() -> Iterator[AdapterUpdater]:
    base = WeightUpdater(ALONE, address="127.0.0.1", shares_devices=False, timeout_s=300.0)
    updater = AdapterUpdater(ALONE, LORA, base, lambda trainer, path: None)
    yield updater
    updater.disconnect()


def update_of(trainer: PeftTrainer) -> WeightUpdate:
    proof = proof_of(trainer.path)  # of the base
    return WeightUpdate(version=str(trainer.version), max_chunk_bytes=None, timeout_s=300.0, proof=proof)


def sync(updater: AdapterUpdater, fleet: RecordingFleet, trainer: PeftTrainer, before: Probe | None = None) -> int:
    num_bytes = updater.update(fleet, trainer, update_of(trainer))
    verify_adapter(fleet, AdapterProof(trainer.probe(), from_args(FieldFlags, ARGS).adapter_fields), 60.0, before)
    return num_bytes


def test_only_the_first_sync_sends_the_base_and_every_sync_is_proved(fleet, trainer, updater):
    sizes, before = [], shared_files()
    for _ in range(3):
        trainer.step()
        fleet.verbs.clear()
        sizes.append(sync(updater, fleet, trainer))
        assert fleet.verbs.count("load_staged_adapter") == 1
        assert [handle.weight_version() for handle in fleet.handles] == [str(trainer.version)] * 2
        assert [handle.adapters() for handle in fleet.handles] == [[ADAPTER_NAME]] * 2
        assert any(verb.startswith("only") for verb in fleet.verbs) == (len(sizes) == 1)
    base = sum(value.nbytes for value in trainer.weights.values())
    adapter = sum(value.nbytes for _, value in trainer.export_adapter())
    assert sizes[0] == base + adapter
    # one copy per host, which the ranks of the engine share and free with the adapter
    held = shared_files() - before
    assert len(held) <= len(fleet.handles), held
    assert sizes[1] == sizes[2] == adapter


def test_an_engine_that_has_restarted_gets_the_base_again(fleet, trainer, updater):
    trainer.step()
    sync(updater, fleet, trainer)
    fleet.handles[1].set_weight_version("default")
    trainer.step()
    fleet.verbs.clear()
    sync(updater, fleet, trainer)
    assert "only [1]" in fleet.verbs


def test_an_adapter_travels_through_files(fleet, trainer, tmp_path):
    def write_base(exporter: Any, path: str) -> None:
        write_hf_directory(exporter.export_weights(), trainer.path, path)

    base = DiskUpdater(ALONE, DiskSettings(tmp_path))
    updater = AdapterUpdater(ALONE, LORA, base, write_base, DiskSettings(tmp_path / "adapter"))
    for _ in range(2):
        trainer.step()
        sync(updater, fleet, trainer)
    assert [path.name for path in (tmp_path / "adapter").glob("weight_v*")] == [f"weight_v{trainer.version:06d}"]


@pytest.mark.parametrize("fault", ["missing", "stale", "scale", "unused"])
def test_a_fault_is_named_at_its_sync(fault, fleet, trainer, updater, monkeypatch):
    trainer.step()
    sync(updater, fleet, trainer)
    before = trainer.probe()
    trainer.step()
    faulty = fleet.handles[1]
    fields, at = from_args(FieldFlags, ARGS).adapter_fields, faulty.url
    # an engine that confirms the new version without loading it
    if fault == "missing":

        def drop(name: str, version: str, **_: Any) -> None:
            faulty._unload_adapter(name)
            faulty.set_weight_version(version)

        monkeypatch.setattr(faulty, "load_staged_adapter", drop)
        expected = "the adapter is missing. The engine has no adapter"
    elif fault == "stale":
        monkeypatch.setattr(faulty, "load_staged_adapter", lambda version, **_: faulty.set_weight_version(version))
        expected = f"they are those of version {before.version}, so the adapter is stale"
    elif fault == "scale":
        at = fleet.handles[0].url
        fleet.changes["load_staged_adapter"] = lambda given: (
            given | {"config": given["config"] | {"lora_alpha": 4 * 8.0 * 8**0.5}}
        )
        expected = "so its scale is wrong"
    else:
        fields, at = {}, fleet.handles[0].url
        expected = "requests do not use the adapter"
    updater.update(fleet, trainer, update_of(trainer))
    with pytest.raises(EngineError) as caught:
        verify_adapter(fleet, AdapterProof(trainer.probe(), fields), 60.0, before)
    assert expected in str(caught.value)
    assert at in str(caught.value)


def test_a_tensor_that_changed_on_the_way_is_refused_by_the_rank_that_got_it(handles, trainer, updater):
    """Last: the server does not survive it."""
    fleet = RecordingFleet(handles[1:], [EngineInfo(handles[1].url, 2)])
    trainer.step()
    sync(updater, fleet, trainer)

    def damage(given: dict[str, Any]) -> dict[str, Any]:
        return given | {"checksums": given["checksums"] | dict.fromkeys(list(given["checksums"])[:1], "0" * 64)}

    fleet.changes["load_staged_adapter"] = damage
    trainer.step()
    with pytest.raises(EngineError, match=r"LORA-CHECK\] rank\d adapter sync MISMATCH"):
        updater.update(fleet, trainer, replace(update_of(trainer), timeout_s=300.0))
