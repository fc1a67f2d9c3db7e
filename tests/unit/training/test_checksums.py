"""Every file of a checkpoint is compared by one rank, whatever the number of ranks that wrote it and that read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from slime.backends.training import checkpoint_source
from slime.backends.training.checkpoint_files import checksums_of, find_damage, written_by
from slime.backends.training.checkpoint_source import Source, verify_source
from slime.utils.errors import ConfigError


def _write(directory: Path, num_writers: int) -> dict[str, str]:
    names = [".metadata", "common.pt", "metadata.json"]
    for rank in range(num_writers):
        names += [f"__{rank}_0.distcp", f"__{rank}_1.distcp", f"rng_{rank:05d}.pt"]
    for name in names:
        (directory / name).write_text(name * 1000)
    return checksums_of(directory.iterdir())


@pytest.mark.parametrize("num_writers", [1, 3, 12])
@pytest.mark.parametrize("num_readers", [1, 2, 5, 16])
def test_each_damaged_file_is_found_by_one_rank(tmp_path: Path, num_writers: int, num_readers: int) -> None:
    checksums = _write(tmp_path, num_writers)
    assert not any(find_damage(tmp_path, checksums, rank, num_readers) for rank in range(num_readers))
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    found = [text for rank in range(num_readers) for text in find_damage(tmp_path, checksums, rank, num_readers)]
    assert sorted(text.partition(" ")[0] for text in found) == sorted(checksums)
    assert all("has the checksum" in text for text in found)


def test_a_rank_reads_the_files_that_it_wrote(tmp_path: Path) -> None:
    checksums = _write(tmp_path, 12)
    assert [path.name for path in written_by(tmp_path, 1)] == ["__1_0.distcp", "__1_1.distcp", "rng_00001.pt"]
    for path in written_by(tmp_path, 11):
        path.unlink()
    assert find_damage(tmp_path, checksums, 10, 12) == []
    assert find_damage(tmp_path, checksums, 11, 12) == [
        f"{name} cannot be read (No such file or directory)"
        for name in ("__11_0.distcp", "__11_1.distcp", "rng_00011.pt")
    ]


def test_a_rank_that_cannot_compare_its_share_ends_the_start_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("Stale file handle")

    def gather(everywhere: list[list[str]], mine: list[str], group: object) -> None:
        everywhere[:] = [[], mine]

    monkeypatch.setattr(checkpoint_source, "read_manifest", fail)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr("slime.utils.distributed_utils.files_group", lambda: None)
    source = Source("torch_dist", str(tmp_path / "iter_0000003"), "--load", 3)
    with pytest.raises(
        ConfigError, match=r"--load .*iter_0000003 is damaged: rank 1 cannot compare.*Stale file handle"
    ):
        verify_source(source)
