"""A Hugging Face directory is written whole or not at all, however many files are written at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.training import hf_export
from slime.backends.training.checkpoint_files import find_damage
from slime.backends.training.checkpoint_source import Source, verify_source
from slime.backends.training.hf_export import export_checksums
from slime.backends.training.hf_files import TensorReader, write_hf_directory
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import quantize_int4

WEIGHTS = {f"layers.{i}.weight": torch.full((4, 4), float(i)) for i in range(9)}
FILE_BYTES = 2 * 4 * 4 * 4


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    return str(tmp_path / "source")


@pytest.mark.parametrize("num_writers", [1, 3, 16])
def test_the_number_of_writers_changes_nothing_on_the_disk(source: str, tmp_path: Path, num_writers: int) -> None:
    path = tmp_path / "out"
    write_hf_directory(WEIGHTS.items(), source, str(path), max_file_bytes=FILE_BYTES, num_writers=num_writers)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: f"model-{i // 2 + 1:05d}-of-00005.safetensors" for i, name in enumerate(WEIGHTS)}
    reader = TensorReader(path, "--hf-checkpoint")
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in WEIGHTS.items())


def test_an_export_replaces_an_earlier_one_with_new_checksums(source: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    for value in (1.0, 2.0):
        write_hf_directory([("a", torch.full((4,), value))], source, str(path))
        assert find_damage(path, export_checksums(path)) == []
    assert TensorReader(path, "--hf-checkpoint").get("a")[0] == 2.0
    again = tmp_path / "again"
    write_hf_directory([("b", torch.zeros(4))], str(path), str(again))  # a marker is not copied with the configuration
    assert find_damage(again, export_checksums(again)) == []


@pytest.mark.parametrize("content", ["iter_0000003/metadata.json", "train.jsonl", "model.safetensors"])
def test_an_export_replaces_nothing_that_no_export_wrote(source: str, tmp_path: Path, content: str) -> None:
    file = tmp_path / "users" / content
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    name = content.partition("/")[0]
    with pytest.raises(ConfigError, match=f"{tmp_path}/users holds {name} and no slime_export.json"):
        write_hf_directory(WEIGHTS.items(), source, str(tmp_path / "users"))
    assert file.read_text() == "precious"

    path = tmp_path / "out"
    write_hf_directory(WEIGHTS.items(), source, str(path))
    file.rename(path / "notes")
    with pytest.raises(ConfigError, match=f"{path} holds notes, which no export wrote"):
        write_hf_directory(WEIGHTS.items(), source, str(path))
    assert (path / "notes").read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path / "users")
    with pytest.raises(ConfigError, match="is a link"):
        write_hf_directory(WEIGHTS.items(), source, str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="is a mount point"):
        write_hf_directory(WEIGHTS.items(), source, "/dev/shm")


def test_files_that_come_while_the_export_is_written_stay(source: str, tmp_path: Path) -> None:
    path = tmp_path / "out"

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(4)
        path.mkdir()
        (path / "train.jsonl").write_text("precious")

    with pytest.raises(ConfigError, match=r"holds train.jsonl and no slime_export.json"):
        write_hf_directory(weights(), source, str(path))
    assert (path / "train.jsonl").read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("num_writers", [1, 3])
def test_a_file_that_cannot_be_written_leaves_nothing(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writers: int
) -> None:
    def save(tensors: object, path: Path, metadata: object) -> None:
        if path.name == "part-2":
            raise OSError("the disk is full")
        path.touch()

    monkeypatch.setattr("safetensors.torch.save_file", save)
    with pytest.raises(OSError, match="the disk is full"):
        write_hf_directory(
            WEIGHTS.items(), source, str(tmp_path / "out"), max_file_bytes=FILE_BYTES, num_writers=num_writers
        )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_a_process_that_died_left_beside_the_target_is_gone_after_the_next_one(
    source: str, tmp_path: Path
) -> None:
    write_hf_directory({"earlier": torch.ones(1)}.items(), source, str(tmp_path / "out"))
    for name in (".out.partial", ".out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of the one before").touch()
    write_hf_directory(WEIGHTS.items(), source, str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    assert not (tmp_path / "out" / "of the one before").exists()


def test_an_export_that_cannot_get_its_name_leaves_the_earlier_one(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_directory([("a", torch.ones(4))], source, str(tmp_path / "out"))
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == ".out.partial":
            raise OSError("stale handle")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr("slime.utils.files._exchange", lambda one, other: False)
        patched.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="stale handle"):
            write_hf_directory([("a", torch.zeros(4))], source, str(tmp_path / "out"))
    assert TensorReader(tmp_path / "out", "--hf-checkpoint").get("a")[0] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_run_that_follows_one_killed_between_the_renames_gets_the_earlier_export_back(
    source: str, tmp_path: Path
) -> None:
    write_hf_directory([("a", torch.ones(4))], source, str(tmp_path / "out"))
    (tmp_path / "out").rename(tmp_path / ".out.old")

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        assert TensorReader(tmp_path / "out", "--hf-checkpoint").get("a")[0] == 1
        yield "a", torch.zeros(4)

    write_hf_directory(weights(), source, str(tmp_path / "out"))
    assert TensorReader(tmp_path / "out", "--hf-checkpoint").get("a")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "files": ["a"]}', '{"format": 2}'])
def test_an_export_with_a_damaged_marker_is_neither_loaded_nor_replaced(
    source: str, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "out"
    write_hf_directory(WEIGHTS.items(), source, str(path))
    (path / "slime_export.json").write_text(content)
    with pytest.raises(ConfigError, match=f"{path} may hold other files .*slime_export.json"):
        write_hf_directory(WEIGHTS.items(), source, str(path))
    with pytest.raises(ConfigError, match=f"--hf-checkpoint {path} is damaged: .*slime_export.json"):
        verify_source(Source("hf", str(path), "--hf-checkpoint"))


def test_a_file_waits_for_the_checksum_of_the_one_before_it(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag: list[int] = []
    num_summed = 0
    compute = hf_export.checksum

    def saved(*args: Any, **kwargs: Any) -> None:
        lag.append(len(lag) - num_summed)
        save_file(*args, **kwargs)

    def slow(path: Path) -> str:
        nonlocal num_summed
        time.sleep(0.05)
        num_summed += 1
        return compute(path)

    monkeypatch.setattr("safetensors.torch.save_file", saved)
    monkeypatch.setattr(hf_export, "checksum", slow)
    write_hf_directory(WEIGHTS.items(), source, str(tmp_path / "out"), max_file_bytes=FILE_BYTES)
    assert len(lag) == 5
    assert max(lag) <= 1


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 1}'])
def test_a_damaged_index_is_an_error_that_names_it(source: str, content: str) -> None:
    (Path(source) / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"--model-dir .*model\.safetensors\.index\.json is damaged"):
        TensorReader(source, "--model-dir")


def test_shapes_are_known_without_reading_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, scale = quantize_int4(torch.randn(6, 64), 32)
    packed = {"m.weight_packed": words, "m.weight_scale": scale, "m.weight_shape": torch.tensor([6, 64])}
    save_file(packed | {"e.weight": torch.zeros(2, 3, 4), "n.weight": torch.zeros(5)}, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path, "--model-dir")
    shapes = {name: tuple(reader.get(name).shape) for name in reader.names}
    sizes = {name: reader.get(name).nbytes for name in reader.names}
    monkeypatch.setattr(TensorReader, "get", None)
    assert {name: reader.shape(name) for name in reader.names} == shapes
    assert {name: reader.num_bytes(name) for name in reader.names} == sizes
    assert shapes == {"m.weight": (6, 64), "e.weight": (2, 3, 4), "n.weight": (5,)}
