"""Engines of a quantized checkpoint receive values and scales, by every transport of weights."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends import EngineInfo
from slime.backends.training.hf_files import TensorReader, write_hf_directory
from slime.config.groups import RunConfig
from slime.ray import weight_updater as wiring
from slime.ray.weight_updater import weight_updater
from slime.weight_sync import send_distributed
from slime.weight_sync.quantize import quantize_fp8
from slime.weight_sync.session import WeightUpdate
from tests.unit.weight_sync.fakes import Done, RecordingFleet

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [2, 2]}
UPDATE = WeightUpdate("1", max_chunk_bytes=1 << 20, timeout_s=600)
WEIGHT, NORM = "layers.0.mlp.weight", "layers.0.norm.weight"


class Trainer:
    """One bf16 matrix, which the engines hold in eight bits, and one vector, which they hold as it is."""

    is_weight_source = True

    def __init__(self, hf_checkpoint: str) -> None:
        self.hf_checkpoint = hf_checkpoint
        generator = torch.Generator().manual_seed(3)
        self.weights = {WEIGHT: torch.randn(4, 6, generator=generator).bfloat16(), NORM: torch.ones(6).bfloat16()}

    def export_weights(self, bucket_bytes: int = 0, recipients: Any = None) -> Any:
        yield from self.weights.items()

    def save_hf(self, path: str) -> None:
        raise AssertionError("these files would not be quantised")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    directory = tmp_path / "hf"
    directory.mkdir()
    values, scale = quantize_fp8(torch.ones(4, 6), (2, 2))
    save_file({WEIGHT: values, WEIGHT + "_scale_inv": scale, NORM: torch.ones(6)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": FP8}), encoding="utf-8")
    return str(directory)


def _args(checkpoint: str, tmp_path: Path, **more: Any) -> Namespace:
    flags = {
        "hf_checkpoint": checkpoint,
        "colocate": False,
        "debug_train_only": False,
        "custom_update_weight_post_write_path": None,
        "update_weight_transport": "nccl",
        "update_weight_mode": "full",
        "update_weight_changed_only": False,
        "update_weight_buffer_size": 1 << 20,
        "update_weights_interval": 1,
        "update_weight_disk_dir": str(tmp_path / "shared"),
        "update_weight_disk_keep_files": False,
        "update_weight_delta_encoding": "xor",
        "update_weight_delta_checksum": "xxh3-128",
        "update_weight_local_checkpoint_dir": None,
        "check_weight_update_equal": False,
        "weight_sync_proof": "none",
        "weight_sync_timeout": 5.0,
        "model_name": None,
    }
    return Namespace(**flags | more)


@pytest.fixture(autouse=True)
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "node_address", lambda: "127.0.0.1")


def _expected(trainer: Trainer) -> dict[str, torch.Tensor]:
    values, scale = quantize_fp8(trainer.weights[WEIGHT], (2, 2))
    return {WEIGHT: values, WEIGHT + "_scale_inv": scale, NORM: trainer.weights[NORM]}


def test_over_the_network(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(checkpoint)
    on_the_wire: list[torch.Tensor] = []
    monkeypatch.setattr(send_distributed, "join_group", lambda *more, **kwargs: "group")
    monkeypatch.setattr(send_distributed, "destroy_group", lambda group: None)
    monkeypatch.setattr(send_distributed.dist, "broadcast", lambda flat, **more: on_the_wire.append(flat) or Done([]))
    fleet = RecordingFleet([EngineInfo("http://a", 1)], weight_version="1")
    weight_updater(RunConfig.of(_args(checkpoint, tmp_path)), 0, 1).update(fleet, trainer, UPDATE)
    (call,) = [kwargs for verb, kwargs in fleet.calls if verb == "update_weights_from_distributed"]
    (flat,) = on_the_wire
    begin = 0
    expected = _expected(trainer)
    for name, dtype, shape in zip(call["names"], call["dtypes"], call["shapes"], strict=True):
        tensor = expected.pop(name)
        assert (dtype, shape) == (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        arrived = flat[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(arrived.float(), tensor.float())
        begin += tensor.nbytes
    assert not expected


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_through_files(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def write(weights: Any, source: str, path: str, *, quantization: Any) -> None:
        write_hf_directory(weights, source, path, quantization=quantization)

    monkeypatch.setattr(wiring, "save_hf_directory", write)  # its collectives need a process group
    local = tmp_path / "local" if mode == "delta" else None
    files = {"update_weight_transport": "disk", "update_weight_local_checkpoint_dir": local}
    args = _args(checkpoint, tmp_path, update_weight_mode=mode, **files)
    updater, trainer = weight_updater(RunConfig.of(args), 0, 1), Trainer(checkpoint)
    fleet = RecordingFleet([EngineInfo("http://a", 1)])
    updater.update(fleet, trainer, UPDATE)
    written = tmp_path / "shared" / "weight_v000001"
    found = {name: tensor for file in written.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = _expected(trainer)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in expected.items())
    assert json.loads((written / "config.json").read_text(encoding="utf-8"))["quantization_config"] == FP8
    again = TensorReader(str(written), "--hf-checkpoint").get(WEIGHT)
    assert (again.float() - trainer.weights[WEIGHT].float()).abs().max() < 0.2
    if mode == "delta":
        trainer.weights[WEIGHT][0, 0] = 9.0
        updater.update(fleet, trainer, WeightUpdate("2", max_chunk_bytes=1 << 20, timeout_s=600))
        manifest = json.loads((tmp_path / "shared" / "weight_v000002" / "slime_weights.json").read_text())
        assert set(manifest["tensors"]) == {WEIGHT, WEIGHT + "_scale_inv"}
        assert 0 < updater.changed_share < 1
    else:
        assert updater.changed_share is None


def test_an_unquantised_checkpoint_gets_the_weights_as_they_are(checkpoint: str, tmp_path: Path) -> None:
    (Path(checkpoint) / "config.json").write_text("{}", encoding="utf-8")
    assert type(weight_updater(RunConfig.of(_args(checkpoint, tmp_path)), 0, 1)).__name__ == "WeightUpdater"
