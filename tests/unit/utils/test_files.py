"""A file that is written beside its place appears complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.utils.files import is_private_directory, replacing


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
