"""Checksums of a checkpoint's files are checked before loading. The error names the damage and an alternative."""

from __future__ import annotations

import argparse
import enum
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.training.pieces import load_object
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model

pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a run of it with the checkpoints 0 and 1 and an export."""
    path = tmp_path_factory.mktemp("damage")
    make_hf_model("qwen3", path / "hf")
    trainer = MegatronTrainer(make_args(path / "hf", save=str(path / "run")), rank=0, world_size=1, with_ref=False)
    trainer.setup()
    for rollout_id in range(2):
        trainer.train(rollout_id, make_batch(seed=rollout_id))
        trainer.save(rollout_id)
    trainer.save_hf(str(path / "export"))
    return path / "hf", path


@pytest.fixture
def run(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[1] / "run", tmp_path / "run"))


def _start(hf: Path, **flags: object) -> int:
    return MegatronTrainer(make_args(hf, **flags), rank=0, world_size=1, with_ref=False).setup()


def _flip(path: Path, size: int = 4096) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + size] = bytes(byte ^ 0xFF for byte in data[middle : middle + size])
    path.write_bytes(data)


def test_flipped_bytes_in_a_shard_are_named_and_the_checkpoint_before_is_offered(
    saved: tuple[Path, Path], run: Path
) -> None:
    hf, _ = saved
    shard = max((run / "iter_0000001").glob("*.distcp"), key=lambda path: path.stat().st_size)
    _flip(shard)
    with pytest.raises(ConfigError, match=rf"--load {run}/iter_0000001 is damaged: {shard.name} has the checksum") as e:
        _start(hf, load=str(run))
    assert f"The one before it is iter_0000000: --load {run} --ckpt-step 0 takes it." in str(e.value)
    with pytest.raises(ConfigError, match=rf"--ref-load {run}/iter_0000001 is damaged"):
        _start(hf, ref_load=str(run))
    assert _start(hf, load=str(run), ckpt_step=0) == 1


def test_an_old_checkpoint_without_checksums_loads_with_a_notice(
    saved: tuple[Path, Path], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = run / "iter_0000001" / "manifest.json"
    content = json.loads(manifest.read_text())
    assert sorted(content.pop("checksums")) == sorted(content["files"])
    manifest.write_text(json.dumps(content))
    assert _start(saved[0], load=str(run)) == 2
    assert "iter_0000001 has no checksums: it is loaded as it is" in caplog.text


def _zeros(data: bytes) -> bytes:
    return bytes(len(data))


def _half_zeros(data: bytes) -> bytes:
    half = len(data) // 2
    return data[:half] + bytes(len(data) - half)


def _empty(_: bytes) -> bytes:
    return b""


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("pattern", [".metadata", "common.pt", "__0_0.distcp", "metadata.json"])
@pytest.mark.parametrize("damage", [_zeros, _half_zeros, _truncated, _empty], ids=lambda f: f.__name__)
@pytest.mark.parametrize("has_manifest", [True, False], ids=["ours", "without a manifest"])
def test_a_damaged_file_is_named_and_no_advice_to_unpickle_it_is_given(
    saved: tuple[Path, Path], run: Path, pattern: str, damage: Callable[[bytes], bytes], has_manifest: bool
) -> None:
    directory = run / "iter_0000001"
    if not has_manifest:
        (directory / "manifest.json").unlink()
    path = directory / pattern
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError) as error:
        _start(saved[0], load=str(directory))
    message = str(error.value)
    assert str(directory) in message
    assert "weights_only" not in message
    assert "ickl" not in message
    if has_manifest or damage is _zeros:
        assert path.name in message
    if not has_manifest:
        assert f"--load {run} --ckpt-step 0 takes it" in message


def test_an_export_with_flipped_bytes_is_no_start(saved: tuple[Path, Path], tmp_path: Path) -> None:
    export = Path(shutil.copytree(saved[1] / "export", tmp_path / "export"))
    assert _start(export) == 0
    (export / "config.json").write_text((export / "config.json").read_text() + "\n")  # weights alone are compared
    assert _start(export) == 0
    _flip(export / "model.safetensors", 64)
    with pytest.raises(ConfigError, match=rf"--hf-checkpoint {export} is damaged: model.safetensors has the checksum"):
        _start(export)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), torch.distributed.DistBackendError("NCCL")])
def test_an_error_of_the_machine_is_not_blamed_on_the_checkpoint(
    saved: tuple[Path, Path], run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("megatron.core.dist_checkpointing.load", fail)
    with pytest.raises(type(error)):
        _start(saved[0], load=str(run))


class _Options:
    """A class of another program, in the flags that its checkpoints hold."""

    class Mode(enum.Enum):
        ON = 1

    class Names(list[str]): ...

    def __init__(self) -> None:
        self.mode, self.names = self.Mode.ON, self.Names(["math"])


def _without_manifest(run: Path) -> Path:
    directory = run / "iter_0000001"
    (directory / "manifest.json").unlink()
    return directory


def test_a_checkpoint_with_flags_of_another_program_loads_without_them(
    saved: tuple[Path, Path], run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    common = _without_manifest(run) / "common.pt"
    flags = argparse.Namespace(evaluations=[_Options()], mode=_Options.Mode.ON, dtype=torch.bfloat16)
    torch.save(torch.load(common, weights_only=False) | {"args": flags}, common)
    monkeypatch.delattr(sys.modules[__name__], "_Options")
    assert _start(saved[0], load=str(run)) == 2
    assert f"{common} has objects of {__name__}._Options, which are left empty" in caplog.text


class _Call:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["common.pt", ".metadata"])
def test_a_checkpoint_cannot_run_code(saved: tuple[Path, Path], run: Path, tmp_path: Path, name: str) -> None:
    file, trace = _without_manifest(run) / name, tmp_path / "ran"
    if name == "common.pt":
        torch.save(torch.load(file, weights_only=False) | {"args": _Call(trace)}, file)
    else:
        metadata = pickle.loads(file.read_bytes())
        metadata.planner_data = _Call(trace)
        file.write_bytes(pickle.dumps(metadata))
    assert _start(saved[0], load=str(run)) == 2
    assert not trace.exists()


def test_an_object_in_a_shard_cannot_run_code(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"state": _Call(tmp_path / "ran"), "step": 3}, stream)
    stream.seek(0)
    assert load_object(stream)["step"] == 3
    assert not (tmp_path / "ran").exists()


def test_an_archive_of_torch_script_is_not_loaded(saved: tuple[Path, Path], run: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), _without_manifest(run) / "common.pt")
    with pytest.raises(ConfigError, match="it is a TorchScript archive, which is code"):
        _start(saved[0], load=str(run))


@pytest.mark.parametrize(
    ("saved_without", "loads"), [("no_save_optim", "no_load_optim"), ("no_save_rng", "no_load_rng")]
)
def test_a_missing_part_of_a_checkpoint_names_the_flag_that_starts_without_it(
    saved: tuple[Path, Path], tmp_path: Path, saved_without: str, loads: str
) -> None:
    args = make_args(saved[0], save=str(tmp_path / "run"), **{saved_without: True})
    trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=False)
    trainer.setup()
    trainer.save(0)
    with pytest.raises(ConfigError, match=f"it has no .* \\(--{loads.replace('_', '-')} "):
        _start(saved[0], load=str(tmp_path / "run"))
    assert _start(saved[0], load=str(tmp_path / "run"), **{loads: True}) == 1


def test_a_checkpoint_in_the_older_format_of_megatron_names_the_one_that_is_read(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "iter_0000001/mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    with pytest.raises(ConfigError, match=f"--ref-load {tmp_path}.*iter_0000001.*--ckpt-format torch_dist"):
        _start(saved[0], ref_load=str(tmp_path))
