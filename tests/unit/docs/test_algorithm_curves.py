"""The curves on the pages of algorithms: as recorded, and all of them rise."""

from __future__ import annotations

import pytest

from benchmarks.algorithm_curves import ALGORITHMS, PICTURES, load_record, pages

RECORDS = load_record()


def test_pages_show_what_was_recorded() -> None:
    for path, text in pages(RECORDS).items():
        assert path.read_text(encoding="utf-8") == text, "run: python benchmarks/algorithm_curves.py --draw"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_a_picture_and_its_accuracy_rose(name: str) -> None:
    accuracy = [value for _, value in RECORDS[name]["accuracy"]]
    assert accuracy[-1] > accuracy[0] + 0.25
    assert (PICTURES / f"{name}.png").stat().st_size < 40_000


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if record["difference"]])
def test_trainer_and_engine_agreed_in_every_step(name: str) -> None:
    assert max(value for _, value in RECORDS[name]["difference"]) < 1e-5
