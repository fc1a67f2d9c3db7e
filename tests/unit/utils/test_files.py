"""A file that is written beside its place appears complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.utils.files import replacing


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
