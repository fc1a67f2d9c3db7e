"""Every transport of weights, against real servers: engines hold the trainer's weights afterwards, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends import EVERY_RANK, EngineInfo, NamedTensor, Recipients
from slime.backends.sglang_utils.engine import SGLangEngine
from slime.backends.sglang_utils.external import expert_blocks, get_server_info
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.training.hf_files import write_hf_directory
from slime.utils.errors import EngineError
from slime.weight_sync import send_distributed, send_tensor
from slime.weight_sync.chunks import WeightChunk
from slime.weight_sync.send_disk import DeltaUpdater, DiskSettings, DiskUpdater
from slime.weight_sync.session import ALONE, WeightUpdate, push_weights
from slime.weight_sync.updater import WeightUpdater
from tests.e2e.engines import HostFleet, LocalFleet, assert_all_compared, make_engine, proof_of, shared_files
from tests.e2e.moe_model import make_moe_model
from tests.e2e.test_engine import generate, model_of, worst_difference

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(tiny_task: Any, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    engine = make_engine(tiny_task, fork_server, tmp_path_factory.mktemp("engine") / "log")
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


class StubTrainer:
    """A trainer of one rank whose weights are those of a checkpoint, moved a little."""

    def __init__(self, model: str) -> None:
        from safetensors.torch import load_file

        files = sorted(Path(model).glob("*.safetensors"))
        self.weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        if json.loads((Path(model) / "config.json").read_text())["tie_word_embeddings"]:
            self.weights.pop("lm_head.weight", None)
        self.model = model
        self.generator = torch.Generator().manual_seed(5)

    def step(self, only: str | None = None) -> None:
        """Move all weights, or those whose name contains ``only``."""
        for name, tensor in self.weights.items():
            if only is None or only in name:
                tensor.add_(torch.randn(tensor.shape, generator=self.generator) * 0.02)

    def export_weights(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        yield from self.weights.items()

    def save_hf(self, path: str) -> None:
        write_hf_directory(self.export_weights(), self.model, path)


def test_tensors_in_shared_memory_arrive_bit_for_bit_and_leave_no_memory_behind(engine, tiny_task):
    trainer = StubTrainer(tiny_task.model)
    fleet = LocalFleet([engine], [EngineInfo(engine.url, 1, first_slot=0)])
    updater = WeightUpdater(ALONE, address="127.0.0.1", shares_devices=True, timeout_s=600)
    engine.reset_weights()
    before = shared_files()
    update = WeightUpdate("1", max_chunk_bytes=1 << 16, timeout_s=600, proof=proof_of(tiny_task.model))
    for version in ("1", "2"):
        trainer.step()
        num_bytes = updater.update(fleet, trainer, dataclasses.replace(update, version=version))
    assert num_bytes == sum(tensor.nbytes for tensor in trainer.weights.values())
    assert update.proof is not None
    assert_all_compared(engine, update.proof)
    assert engine.weight_version() == "2"
    assert shared_files() == before


@pytest.mark.parametrize(
    "small_bytes", [0, 1 << 13, 1 << 40], ids=["tensor by tensor", "the small ones first", "as one row of bytes"]
)
def test_broadcasts_arrive_bit_for_bit(engine, tiny_task, monkeypatch, small_bytes):
    monkeypatch.setattr(send_distributed, "_SMALL_BYTES", small_bytes)
    monkeypatch.setattr(send_distributed, "_FEW", 0)
    trainer = StubTrainer(tiny_task.model)
    updater = WeightUpdater(ALONE, address="127.0.0.1", shares_devices=False, timeout_s=600)
    engine.reset_weights()
    update = WeightUpdate("1", max_chunk_bytes=1 << 16, timeout_s=600, proof=proof_of(tiny_task.model))
    try:
        for version in ("1", "2"):
            trainer.step()
            updater.update(LocalFleet([engine]), trainer, dataclasses.replace(update, version=version))
    finally:
        updater.disconnect(is_urgent=True)
    assert update.proof is not None
    assert_all_compared(engine, update.proof)
    assert engine.weight_version() == "2"


@pytest.mark.parametrize("encoding", [None, "xor", "overwrite"])
def test_files_arrive_bit_for_bit_in_full_or_as_differences(engine, tiny_task, tmp_path, encoding):
    trainer = StubTrainer(tiny_task.model)
    settings = DiskSettings(tmp_path / "shared", None if encoding is None else tmp_path / "local")
    updater = DiskUpdater(ALONE, settings) if encoding is None else DeltaUpdater(ALONE, settings, encoding=encoding)
    engine.reset_weights()
    update = WeightUpdate("1", max_chunk_bytes=1 << 16, timeout_s=600, proof=proof_of(tiny_task.model))
    sizes = []
    for version in ("1", "2", "3"):
        trainer.step(only=None if version == "1" else "layers.1.mlp.down_proj")
        sizes.append(updater.update(HostFleet([engine]), trainer, dataclasses.replace(update, version=version)))
    assert update.proof is not None
    assert_all_compared(engine, update.proof)
    assert engine.weight_version() == "3"
    if encoding is not None:
        assert max(sizes[1:]) < sizes[0] / 4


class BothDevices:
    """Sends to an engine of two devices, each with the experts of its block, in place of two trainer ranks."""

    def __init__(self, fleet: LocalFleet, num_experts: int) -> None:
        self.fleet = fleet
        blocks = Recipients(blocks=((0, 2), (1, 2)))
        self.experts = [blocks.experts(rank, num_experts) for rank in range(2)]

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        texts, held = [], []
        for experts in self.experts:
            part = WeightChunk([named for named in chunk.tensors if expert_of(named[0]) in (None, *experts)])
            held.append(send_tensor.shareable(part))
            texts += send_tensor.payloads(part, [send_tensor.handle_of(held[-1])])
        call = self.fleet.start(
            "update_weights_from_tensor", serialized_named_tensors=texts, weight_version=weight_version
        )
        call.wait(300)

    def finish(self) -> None: ...

    def disconnect(self) -> None: ...


def expert_of(name: str) -> int | None:
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def test_engines_of_different_width_get_the_same_mixture_of_experts(tiny_task, fork_server, tmp_path):
    model_path = str(make_moe_model(tiny_task, tmp_path / "model"))
    task = SimpleNamespace(model=model_path)
    wide = make_engine(task, fork_server, tmp_path / "wide.log", "--tp-size", "2", "--ep-size", "2")
    narrow = make_engine(task, fork_server, tmp_path / "narrow.log")
    trainer = StubTrainer(model_path)
    updater = WeightUpdater(ALONE, address="127.0.0.1", shares_devices=False, timeout_s=600, changed_only=True)
    fleet = LocalFleet([wide, narrow], [EngineInfo(wide.url, 2, expert_blocks=2), EngineInfo(narrow.url, 1)])
    sizes, proof = [], proof_of(model_path)

    def reference_of(version: str) -> Any:
        write_hf_directory(trainer.export_weights(), model_path, str(tmp_path / version))
        return model_of(SimpleNamespace(model=str(tmp_path / version)))

    try:
        for start in [fleet.pool.submit(each.start) for each in (wide, narrow)]:
            start.result()
        output, log_probs, _ = generate(wide, [5, 6, 7, 8])
        assert worst_difference(model_of(task), [5, 6, 7, 8], output, log_probs) < 1e-5, "before the first update"
        fleet.start("reset_weights").wait(300)
        for version, only in (("0", "nothing"), ("1", None), ("2", "experts.3.")):
            trainer.step(only=only)
            update = WeightUpdate(version, max_chunk_bytes=1 << 14, timeout_s=600, proof=proof, restores=version == "0")
            sizes.append(updater.update(fleet, trainer, update))
        with pytest.raises(EngineError, match="refused weights_checker"):
            fleet.start("compare_weights").wait(300)
        assert_all_compared(wide, proof, blocks=2)
        assert_all_compared(narrow, proof)
        answers = [generate(each, [5, 6, 7, 8]) for each in (wide, narrow)]
        references = [reference_of("2")]
        assert [expert_blocks(get_server_info(each.url)) for each in (wide, narrow)] == [2, 1]
        # each device gets the experts of its block only
        trainer.step()
        by_block = EngineInfo(wide.url, 2, first_slot=0, expert_blocks=2)
        update = WeightUpdate("3", max_chunk_bytes=1 << 30, timeout_s=600)
        only_wide = LocalFleet([wide], [by_block])
        push_weights(only_wide, BothDevices(only_wide, num_experts=8), trainer.export_weights(), update)
        answers.append(generate(wide, [5, 6, 7, 8]))
        references.append(reference_of("3"))
    finally:
        updater.disconnect(is_urgent=True)
        wide.stop()
        narrow.stop()
    assert sizes[2] < sizes[0] / 4, "what has not changed is not sent again"
    for number, (output, log_probs, version) in enumerate(answers):
        reference = references[number // 2]
        assert version == ("2", "2", "3")[number]
        assert worst_difference(reference, [5, 6, 7, 8], output, log_probs) < 1e-5
