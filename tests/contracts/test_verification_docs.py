"""``docs/verification.md`` claims nothing that no test asserts."""

from __future__ import annotations

from pathlib import Path

from tests.verification import rows_of_page

_ROOT = Path(__file__).parents[2]


def test_every_row_belongs_to_a_test_that_verifies_it() -> None:
    rows = rows_of_page()
    assert len(rows) > 20
    assert len({(row.what, row.against) for row in rows}) == len(rows)
    for row in rows:
        text = (_ROOT / row.test).read_text(encoding="utf-8")
        assert "verify(" in text, row
        assert row.against in text, f"{row.test} compares nothing with {row.against!r}"
