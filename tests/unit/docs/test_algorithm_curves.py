"""The pages of algorithms show the recorded curves."""

from __future__ import annotations

from benchmarks.algorithm_curves import ALGORITHMS, PICTURES, load_record, pages


def test_pages_show_the_record() -> None:
    for path, text in pages(load_record()).items():
        assert path.read_text(encoding="utf-8") == text, "run: python benchmarks/algorithm_curves.py --draw"


def test_every_algorithm_has_a_record_and_a_picture() -> None:
    assert load_record().keys() >= set(ALGORITHMS)
    assert [name for name in ALGORITHMS if not (PICTURES / f"{name}.png").is_file()] == []
