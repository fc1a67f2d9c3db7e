"""A file that is written beside its place appears complete or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from slime.utils import files
from slime.utils.files import is_private_directory, replace_directory, replacing


def test_a_file_becomes_the_new_one_at_the_end_of_the_block(tmp_path: Path) -> None:
    place = tmp_path / "folder" / "file"
    for text in ("old", "new"):
        before = place.read_text() if place.exists() else None
        with replacing(place) as partial:
            partial.write_text(text)
            assert (place.read_text() if place.exists() else None) == before
        assert place.read_text() == text
    assert list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize("writes", [True, False])
def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(writes: bool, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("old")

    def fail() -> None:
        with replacing(place) as partial:
            if writes:
                partial.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]


def test_the_new_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "file"
    synced: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().read_text(), place.exists()))

    monkeypatch.setattr("os.fsync", fsync)
    for sync in (True, False):
        with replacing(place, sync=sync) as partial:
            partial.write_text("new")
    assert synced == [("new", False)]


def test_files_of_killed_writers_are_deleted_when_they_are_old(tmp_path: Path) -> None:
    two_days_ago = time.time() - 2 * 24 * 3600
    left, others = [".state.json.7.partial", ".rollout_3.pt.4711.partial"], [".mine.partial", "state.json.7.partial"]
    for name in (*left, *others, ".state.json.8.partial"):
        (tmp_path / name).write_text("ha")
        if not name.startswith(".state.json.8"):  # perhaps by a writer on another host
            os.utime(tmp_path / name, (two_days_ago, two_days_ago))
    with replacing(tmp_path / "state.json") as partial:
        partial.write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"state.json", ".state.json.8.partial", *others}


def _directory(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "weights").write_text(content)
    return path


def test_a_directory_is_at_its_place_while_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, new = _directory(tmp_path / "target", "old"), _directory(tmp_path / ".new", "new")

    def fail(*_: Any) -> None:
        raise OSError("there is nothing at the target after the first of two renames")

    monkeypatch.setattr(Path, "rename", fail)
    replace_directory(target, new, tmp_path / ".old")
    assert (target / "weights").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("fails", [False, True])
def test_without_an_exchange_of_names_a_directory_is_renamed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target, new = _directory(tmp_path / "target", "old"), tmp_path / ".new"
    _directory(tmp_path / ".old", "older")
    if fails:
        with pytest.raises(FileNotFoundError):
            replace_directory(target, new, tmp_path / ".old")
    else:
        replace_directory(target, _directory(new, "new"), tmp_path / ".old")
    assert (target / "weights").read_text() == ("old" if fails else "new")
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_is_private_where_only_its_owner_can_write(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    assert is_private_directory(place)
    assert place.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707):
        place.chmod(mode)
        assert not is_private_directory(place)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "file").touch()
    assert not is_private_directory(tmp_path / "link")
    assert not is_private_directory(tmp_path / "file")
