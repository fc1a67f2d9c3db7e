"""The page of environment variables names those that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.config.resolve.cluster import _UNREAD

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
_READ = re.compile(r"environ(?:\.get)?[\[(]\s*\"([A-Z][A-Z0-9_]+)\"")
_CONSTANT = re.compile(
    r"^_?[A-Z_]+ = \"((?:SLIME|SGLANG|DSA|OPEN_TRAINING|TEACHER|MEGATRON)_[A-Z0-9_]+)\"$", re.MULTILINE
)
_OF_OTHERS = (
    "RANK",
    "WORLD_SIZE",
    "PYTHON",
    "RAY_",
    "XDG_CACHE_HOME",
    "OPENAI_BASE_URL",
    "MALLOC_",
    "SGLANG_",
    "SLURM_JOB_NUM",
)
_BETWEEN_PROCESSES = (
    "SLIME_FORK_SERVER",
    "SLIME_GUARD_FD",
    "SLIME_WEIGHT_INTERFACES",
    "SLIME_FANOUT_TEST_COUNTER_FILE",
)


def _variables() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "slime").rglob("*.py")]
    found = {name for text in texts for pattern in (_READ, _CONSTANT) for name in pattern.findall(text)}
    return sorted(name for name in found if not name.startswith((*_OF_OTHERS, *_BETWEEN_PROCESSES)))


def _is_on_page(name: str) -> bool:
    families = re.findall(r"`([A-Z0-9_]+_)\*`", PAGE)
    return f"`{name}`" in PAGE or name.startswith(tuple(families))


def test_the_search_finds_variables_in_either_spelling() -> None:
    assert {"TENSORBOARD_DIR", "DSA_KV_FP8_QAT"} <= set(_variables())


@pytest.mark.parametrize("name", [*_variables(), *_UNREAD])
def test_a_variable_that_is_read_is_on_the_page(name: str) -> None:
    assert _is_on_page(name), f"docs/environment.md does not name {name}"
