"""The tables of model pages equal the output of ``slime plan``, and every preset is on a page."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tools.make_model_pages import DOCS, FAMILIES, GUIDES, PAGES, SCRIPTS_OF_GUIDES, pages
from tools.make_presets import load_presets

FOR_TESTS = {"deepseek-v3-5layer", "deepseek-v3-20layer", "glm4-32B"}
"""Presets of no published model."""


@functools.cache
def made() -> dict[Path, str]:
    return pages()


TABLES = [FAMILIES, *(DOCS / f"{page}.md" for page in PAGES), *(GUIDES / f"{guide}.md" for guide in SCRIPTS_OF_GUIDES)]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_table_of_a_page_is_what_the_plan_says(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == made()[path], "run: python tools/make_model_pages.py"


def test_every_preset_of_a_published_model_is_on_a_page_itself_or_by_the_one_it_varies() -> None:
    shown = {preset for presets in PAGES.values() for preset in presets}
    presets = load_presets()
    assert {name for name in presets if name not in shown and presets[name].parent not in shown} - FOR_TESTS == set()


def test_every_family_is_in_the_table_of_models() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert {page for page in PAGES if f"]({page}.md)" not in index} == set()
    assert {path.stem for path in DOCS.glob("*.md")} == {*PAGES, "README"}
