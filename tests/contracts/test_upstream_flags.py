"""Every flag of the frozen list exists here with its default, or is a row of the table of differences.

``upstream_flags.csv`` is the frozen list. ``docs/flag_differences.csv`` lists intended differences and is part
of ``docs/flags.md``.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.parse import build_parser
from slime.ray.arguments import GROUPS

ROOT = Path(__file__).parents[2]
PARSER = build_parser(GROUPS)
ACTIONS: dict[str, argparse.Action] = PARSER._option_string_actions


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


FLAGS = read(Path(__file__).with_name("upstream_flags.csv"))
DIFFERENCES = {(row["flag"], row["what"]) for row in read(ROOT / "docs" / "flag_differences.csv")}


def value_of(text: str, kind: str) -> Any:
    """The default in the frozen list as Python sees it."""
    match text, kind:
        case ("None", _):
            return None
        case (_, "switch"):
            return text == "True"
        case (_, "int"):
            return int(text)
        case (_, "float"):
            return float(text)
        case (_, "json"):
            return json.loads(text)
        case _:
            return ast.literal_eval(text) if text.startswith("[") else text


def differences(row: dict[str, str]) -> set[tuple[str, str]]:
    action = ACTIONS.get(row["flag"])
    if action is None:
        return {(row["flag"], "missing")}
    found = set()
    if action.dest != row["dest"]:
        found.add((row["flag"], "name"))
    if action.default != value_of(row["default"], row["type"]):
        found.add((row["flag"], "default"))
    choices = row["choices"].split("|") if row["choices"] else None
    ours = None if action.choices is None else list(map(str, action.choices))
    if ours is not None and set(ours) != set(choices or []):
        found.add((row["flag"], "choices"))
    if (action.nargs == 0) != (row["type"] == "switch"):
        found.add((row["flag"], "kind"))
    if action.required:
        found.add((row["flag"], "required"))
    return found


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: row["flag"])
def test_a_flag_of_launch_scripts_means_the_same(row: dict[str, str]):
    assert differences(row) <= DIFFERENCES


def test_the_table_of_differences_names_nothing_that_is_equal():
    actual = set().union(*map(differences, FLAGS))
    structural = {
        item for item in DIFFERENCES if item[1] in ("missing", "name", "default", "choices", "required", "kind")
    }
    assert structural - actual == set()


def test_no_choice_of_launch_scripts_is_missing():
    for row in FLAGS:
        action = ACTIONS.get(row["flag"])
        if action is not None and action.choices is not None and row["choices"]:
            assert set(row["choices"].split("|")) <= set(map(str, action.choices)), row["flag"]


def test_every_flag_explains_itself():
    silent = [flag for flag, action in ACTIONS.items() if not action.help]
    assert silent == []
