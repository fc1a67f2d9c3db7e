"""Offload between steps: the memory is really given back, and training does not notice."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from slime.backends import TRAINER_PARTS
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.megatron_utils.weights import device_memory
from slime.backends.training.offload import DeviceMemory
from slime.utils.errors import SlimeError
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, weights_of
from tests.verification import verify

_SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"fp32": False},
    "bf16-whole-states": {"fp32": False, "use_distributed_optimizer": False},
}


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    dense, moe = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp("moe")
    make_hf_model("qwen3", dense)
    make_family_checkpoint("qwen3_moe", moe)
    return {"dense": dense, "moe": moe}


def _trainer(path: Path, **overrides: Any) -> MegatronTrainer:
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1} | overrides
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=True)
    assert trainer.setup() == 0
    return trainer


def _num_bytes(trainer: MegatronTrainer) -> int:
    """Memory of the trainer's tensors, whichever object owns them."""
    storages = {}
    memory = trainer._device
    for part in TRAINER_PARTS:
        for tensor in memory._tensors(part):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("kind", "name"), [("dense", name) for name in _SETTINGS] + [("moe", "bf16")], ids=lambda value: str(value)
)
def test_training_with_offload_between_the_steps_is_bit_for_bit_that_without(
    kind: str, name: str, checkpoints: dict[str, Path]
) -> None:
    batches = [make_batch(8, seed=seed) for seed in range(3)]
    plain = _trainer(checkpoints[kind], **_SETTINGS[name])
    expected = [(plain.train(i, batch).steps, weights_of(plain)) for i, batch in enumerate(batches)]

    trainer = _trainer(checkpoints[kind], **_SETTINGS[name])
    trainer.offload()  # before the first step the optimizer has no moments
    for i, batch in enumerate(batches):
        trainer.onload()
        occupied = _num_bytes(trainer)
        steps, weights = expected[i]
        assert trainer.train(i, batch).steps == steps
        trainer.offload(["gradients", "optimizer"])
        assert 0 < _num_bytes(trainer) < occupied, "the weights are still there"
        for key, value in trainer.export_weights():
            verify("weights of a trainer that offloads", "one that does not", value, weights[key])
        trainer.offload()
        assert _num_bytes(trainer) == 0
        trainer.offload()  # again is fine


def test_what_needs_memory_that_is_offloaded_says_so(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    trainer = _trainer(checkpoints["dense"], save=str(tmp_path))
    batch = make_batch(8)
    trainer.offload(["gradients", "optimizer"])
    with pytest.raises(SlimeError, match=r"training needs the trainer's gradients and optimizer on the device: call"):
        trainer.train(0, batch)
    with pytest.raises(SlimeError, match="a checkpoint needs the trainer's optimizer on"):
        trainer.save(0)
    assert dict(trainer.export_weights())
    trainer.offload(["weights"])
    with pytest.raises(SlimeError, match="the export of weights needs the trainer's weights on"):
        trainer.export_weights()
    with pytest.raises(SlimeError, match="weights"):
        trainer.keep_version("1")
    trainer.onload(["weights", "optimizer"])
    trainer.save(0)
    trainer.onload()
    trainer.train(0, batch)


def test_host_memory_of_offloaded_gradients_goes_back_to_the_system() -> None:
    megabytes = 256
    process = psutil.Process()
    model = torch.nn.Linear(8, 8)
    gradients = torch.ones(megabytes * 1024**2 // 4)
    model.buffers, model.expert_parallel_buffers = [SimpleNamespace(grad_data=gradients)], []
    optimizer = SimpleNamespace(optimizer=torch.optim.Adam(model.parameters()), zero_grad=lambda set_to_none: None)
    memory = device_memory([model], optimizer)
    view = gradients[5:9]
    before = process.memory_info().rss
    memory.offload()
    freed = (before - process.memory_info().rss) / 1024**2
    assert freed > 0.95 * megabytes
    memory.onload()
    assert view.tolist() == [0.0] * 4
    assert gradients.sum() == 0


def test_dead_cycles_are_collected_and_what_lives_at_the_first_time_is_looked_at_then_only() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    weights = torch.ones(8)
    memory = DeviceMemory(lambda part: [weights] if part == "weights" else [], lambda: None)
    spared, kept = [], []
    try:
        for _ in range(2):
            cycle = weakref.ref(Cycle())
            memory.offload()
            assert cycle() is None
            spared.append(gc.get_freeze_count())
            kept += [[] for _ in range(1000)]
            memory.onload()
    finally:
        gc.unfreeze()
    assert 0 < spared[1] < spared[0] + len(kept) // 2
