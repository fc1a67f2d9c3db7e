"""A Hugging Face directory is written whole or not at all, however many files are written at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime.backends.training import hf_files
from slime.backends.training.hf_files import TensorReader, save_hf_directory, write_hf_directory
from slime.utils.errors import SlimeError

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


@pytest.mark.parametrize("num_writers", [1, 3])
def test_a_file_that_cannot_be_written_leaves_nothing(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writers: int
) -> None:
    def save(tensors: object, path: Path, metadata: object) -> None:
        if path.name == "part-2":
            raise OSError("the disk is full")
        path.touch()

    monkeypatch.setattr(hf_files, "save_file", save)
    with pytest.raises(OSError, match="the disk is full"):
        write_hf_directory(
            WEIGHTS.items(), source, str(tmp_path / "out"), max_file_bytes=FILE_BYTES, num_writers=num_writers
        )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_writer_that_fails_takes_part_to_the_end_because_the_other_ranks_wait_for_it_at_every_tensor(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(hf_files, "save_file", fail)
    monkeypatch.setattr(hf_files, "_MAX_FILE_BYTES", FILE_BYTES)
    monkeypatch.setattr(hf_files.dist, "broadcast_object_list", lambda *_, **__: None)
    weights = iter(WEIGHTS.items())
    with pytest.raises(SlimeError, match=r"--save-hf .*the disk is full"):
        save_hf_directory(weights, source, str(tmp_path / "out"), is_writer=True)
    assert list(weights) == []
