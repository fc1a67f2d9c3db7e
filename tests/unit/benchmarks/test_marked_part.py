"""A benchmark writes its own part of a page, and never over anything else."""

from __future__ import annotations

import pytest

from benchmarks.marked_part import with_part

MARKS = ("<begin>", "<end>")


def test_only_what_is_between_the_marks_is_replaced() -> None:
    once = with_part("page.md", "above\n<begin>old<end>\nbelow\n", MARKS, "new")
    assert once == "above\n<begin>\n\nnew\n\n<end>\nbelow\n"
    assert with_part("page.md", once, MARKS, "new") == once


@pytest.mark.parametrize(
    "text", ["", "a <begin> b", "a <end> b", "<end> a <begin>", "<begin><begin><end>", "<begin><end><end>"]
)
def test_a_page_without_its_marks_is_not_written(text: str) -> None:
    with pytest.raises(SystemExit, match=r"page\.md needs the lines <begin> and <end>"):
        with_part("page.md", text, MARKS, "new")
