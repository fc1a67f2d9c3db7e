"""Several ranks write one Hugging Face directory: the same files as one rank would, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime.backends.training.checkpoint_files import find_damage
from slime.backends.training.hf_export import export_checksums
from slime.weight_sync.tensor_files import checksum_function, checksums_of
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_hf_model

_CASE = "tests.dist.checkpoint_cases:export"
_PP2_TP2 = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "hf"
    make_hf_model("qwen3", path)
    return path


def _content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_the_files_do_not_depend_on_the_ranks_that_write_them(ranks: ForkServer, hf: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    written = {}
    for num_writers in (1, 3, 4):
        path = tmp_path / str(num_writers)
        results = ranks.run(_CASE, 4, hf=str(hf), args=_PP2_TP2, path=str(path), num_writers=num_writers)
        assert [error for error, _ in results] == [""] * 4
        written[num_writers] = _content(path)
        counts = [len(names) for _, names in results]
        assert sum(count > 0 for count in counts) == num_writers
        assert max(counts) - min(count for count in counts if count) <= 1
        assert find_damage(path, export_checksums(path)) == []
    assert written[1] == written[3] == written[4]
    original = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "4").state_dict()
    assert loaded.keys() == original.keys()
    assert all(torch.equal(loaded[name], value) for name, value in original.items())


@pytest.mark.parametrize("sees_no", ["_has_token", "_names_hash"])
def test_a_rank_that_does_not_see_the_directories_writes_nothing(
    sees_no: str, ranks: ForkServer, hf: Path, tmp_path: Path
) -> None:
    for is_blind, path in ((None, tmp_path / "two"), (1, tmp_path / "one")):
        results = ranks.run(
            _CASE, 2, hf=str(hf), args={}, path=str(path), num_writers=8, is_blind=is_blind, sees_no=sees_no
        )
        assert [bool(names) for _, names in results] == [True, is_blind is None]
    assert _content(tmp_path / "one") == _content(tmp_path / "two")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_nothing(
    rank: int, ranks: ForkServer, hf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    for error, _ in ranks.run(_CASE, 2, hf=str(hf), args={}, path=str(path), num_writers=8, full_disk_on=rank):
        assert error == f"--save-hf {path}: rank {rank}: OSError: [Errno 28] No space left on device"
    assert list(tmp_path.iterdir()) == []


_PUBLISH = "tests.dist.checkpoint_cases:publish"


@pytest.mark.parametrize("is_blind", [None, 1])
def test_the_ranks_that_see_a_version_of_a_weight_sync_divide_its_checksums(
    is_blind: int | None, ranks: ForkServer, hf: Path, tmp_path: Path
) -> None:
    results = ranks.run(_PUBLISH, 3, hf=str(hf), root=str(tmp_path / "shared"), is_blind=is_blind)
    folder = tmp_path / "shared" / "weight_v000001"
    shares = [result["files"] for result in results]
    assert sorted(name for share in shares for name in share) == sorted(p.name for p in folder.glob("*.safetensors"))
    assert [bool(share) for share in shares] == [True, is_blind is None, True]
    manifest = json.loads(results[0]["manifest"])
    assert manifest["tensors"] == checksums_of(folder, checksum_function(manifest["checksum"]))


def test_a_version_that_one_rank_cannot_read_is_an_error_on_all(ranks: ForkServer, hf: Path, tmp_path: Path) -> None:
    results = ranks.run(_PUBLISH, 2, hf=str(hf), root=str(tmp_path / "shared"), unreadable_on=1)
    assert [(result["error"], result["manifest"]) for result in results] == [("the disk cannot be read", "")] * 2
