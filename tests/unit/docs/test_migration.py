"""What the page for users of slime says about names: those that exist do, those that do not exist do not."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
NAMES = PAGE[PAGE.index("## Names that plugins import") : PAGE.index("## Missing parts")]


def exists(path: str) -> bool:
    """A module, or a name inside one."""
    owner, _, name = path.rpartition(".")
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(owner), name)
        except ModuleNotFoundError:
            return False
    return True


def test_names_that_are_said_to_be_there_can_be_imported() -> None:
    missing = []
    for modules, text in re.findall(r"^\| (`slime.*?) \| (.*) \|$", NAMES, re.MULTILINE):
        room = re.findall(r"`([\w.]+?)(?:\.\*)?`", modules)[0]
        for name in re.findall(r"`([\w.]+)`", text):
            if not exists(f"{room}.{name}"):
                missing.append(f"{room}.{name}")
    assert missing == []


def test_names_that_are_said_to_be_missing_are() -> None:
    paragraph = NAMES[NAMES.index("Not there:") :]
    names = [name for name in re.findall(r"`([\w.]+?)(?:\.\*)?`", paragraph) if name.startswith("slime")]
    assert len(names) >= 4
    assert [name for name in names if exists(name)] == []
