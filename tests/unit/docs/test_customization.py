"""The snippets about users' functions do what the pages say, and every flag that names a function has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.hooks.protocols import HOOKS
from slime.testing import check_plugin

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = DOCS / "en" / "get_started" / "customization.md"
SECTION = re.compile(r"^### `(--[a-z-]+)`\n(.*?)(?=^#)", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)


def snippets() -> list[tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8") + "\n#"
    return [(flag, code) for flag, body in SECTION.findall(text) for code in SNIPPET.findall(body)]


@pytest.mark.parametrize(("flag", "code"), snippets(), ids=lambda value: value.split("\n")[0][:40])
def test_a_snippet_keeps_the_contract_of_its_flag(flag: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(code)
    name = re.findall(r"^(?:async def|def|class) (\w+)", code, re.MULTILINE)[-1]
    assert check_plugin(flag, f"{file}:{name}") == []


def test_every_flag_that_names_a_function_has_a_snippet() -> None:
    assert {hook.flag for hook in HOOKS} - {flag for flag, _ in snippets()} == set()
