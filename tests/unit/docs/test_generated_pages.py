"""Tables and curves on the pages equal the output of the tools that write them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks import algorithm_curves
from tests.unit.scripts.dry_run import launchers
from tools import make_model_pages
from tools.make_model_pages import DOCS, FAMILIES, GUIDES, PAGES, SCRIPTS_OF_GUIDES
from tools.make_presets import load_presets

FOR_TESTS = {"deepseek-v3-5layer", "deepseek-v3-20layer", "glm4-32B"}
"""Presets of no published model."""
TABLES = [FAMILIES, *(DOCS / f"{page}.md" for page in PAGES), *(GUIDES / f"{guide}.md" for guide in SCRIPTS_OF_GUIDES)]

model_pages = functools.cache(make_model_pages.pages)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_table_of_a_model_page_is_the_output_of_the_plan(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == model_pages()[path], "run: python tools/make_model_pages.py"


@pytest.mark.parametrize("script", launchers())
def test_a_recipe_fits_devices_of_80_gb_and_nodes_of_2_tb(script: str, tmp_path: Path) -> None:
    plan = make_model_pages.Reader(tmp_path).script(script).plan
    assert plan.gaps == []
    assert plan.device_bytes == 80 * 2**30
    assert max(stage.total for stage in plan.stages) < 0.9 * plan.device_bytes, "a tenth is for CUDA and NCCL"
    trains_only = plan.engine is None
    assert trains_only == script.endswith("-sft.sh")
    assert trains_only or plan.engine.sequences > 0
    assert plan.host is not None
    assert plan.host_bytes <= 2e12 * 1.1
    assert plan.host.total < 0.7 * plan.host_bytes, "Ray's object store may take 30 percent"


def test_every_preset_of_a_published_model_or_its_base_is_on_a_page() -> None:
    shown = {preset for presets in PAGES.values() for preset in presets}
    presets = load_presets()
    assert {name for name in presets if name not in shown and presets[name].parent not in shown} - FOR_TESTS == set()


def test_every_family_is_in_the_table_of_models() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert {page for page in PAGES if f"]({page}.md)" not in index} == set()
    assert {path.stem for path in DOCS.glob("*.md")} == {*PAGES, "README"}


def test_pages_of_algorithms_show_the_recorded_curves() -> None:
    records = algorithm_curves.load_record()
    assert records.keys() >= set(algorithm_curves.ALGORITHMS)
    for path, text in algorithm_curves.pages(records).items():
        assert path.read_text(encoding="utf-8") == text, "run: python benchmarks/algorithm_curves.py --draw"
