"""Names on pages exist in the code, and the other way round: environment variables, and names that plugins import."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from slime.config.resolve.cluster import _UNREAD

ROOT = Path(__file__).parents[3]
VARIABLES = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
MIGRATION = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
NAMES = MIGRATION[MIGRATION.index("## Names that plugins import") : MIGRATION.index("## Missing parts")]
READ = re.compile(r"environ(?:\.get)?[\[(]\s*\"([A-Z][A-Z0-9_]+)\"")
CONSTANT = re.compile(
    r"^_?[A-Z_]+ = \"((?:SLIME|SGLANG|DSA|OPEN_TRAINING|TEACHER|MEGATRON)_[A-Z0-9_]+)\"$", re.MULTILINE
)
OF_OTHERS = ("RANK", "WORLD_SIZE", "PYTHON", "RAY_", "XDG_CACHE_HOME", "OPENAI_BASE_URL", "MALLOC_", "SGLANG_")
OF_OTHERS += ("SLURM_JOB_NUM",)
BETWEEN_PROCESSES = ("SLIME_FORK_SERVER", "SLIME_GUARD_FD", "SLIME_WEIGHT_INTERFACES", "SLIME_FANOUT_TEST_COUNTER_FILE")
BETWEEN_PROCESSES += ("SLIME_WORKER_FORKS", "SLIME_WORKER_ROLE")


def variables() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "slime").rglob("*.py")]
    found = {name for text in texts for pattern in (READ, CONSTANT) for name in pattern.findall(text)}
    return sorted(name for name in found if not name.startswith((*OF_OTHERS, *BETWEEN_PROCESSES)))


def test_the_search_finds_variables_in_either_spelling() -> None:
    assert {"TENSORBOARD_DIR", "DSA_KV_FP8_QAT"} <= set(variables())


@pytest.mark.parametrize("name", [*variables(), *_UNREAD])
def test_a_variable_that_is_read_is_on_the_page(name: str) -> None:
    families = re.findall(r"`([A-Z0-9_]+_)\*`", VARIABLES)
    assert f"`{name}`" in VARIABLES or name.startswith(tuple(families)), f"docs/environment.md does not name {name}"


def exists(path: str) -> bool:
    """Whether such a module exists, or such a name inside one."""
    owner, _, name = path.rpartition(".")
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(owner), name)
        except ModuleNotFoundError:
            return False
    return True


def test_names_in_the_table_for_plugins_can_be_imported() -> None:
    missing = []
    for owners, text in re.findall(r"^\| (`slime.*?) \| (.*) \|$", NAMES, re.MULTILINE):
        room = re.findall(r"`([\w.]+?)(?:\.\*)?`", owners)[0]
        missing += [f"{room}.{name}" for name in re.findall(r"`([\w.]+)`", text) if not exists(f"{room}.{name}")]
    assert missing == []


def test_names_that_the_page_lists_as_missing_do_not_exist() -> None:
    paragraph = NAMES[NAMES.index("Not there:") :]
    names = [name for name in re.findall(r"`([\w.]+?)(?:\.\*)?`", paragraph) if name.startswith("slime")]
    assert len(names) >= 4
    assert [name for name in names if exists(name)] == []
