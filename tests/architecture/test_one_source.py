"""Facts that live in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from slime.algorithms import ESTIMATORS
from tests.architecture.sources import Module, modules


def estimator_names(module: Module) -> Iterator[str]:
    """Estimators that the strings of a module name, docstrings left out."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value.removeprefix("--advantage-estimator ")
            if any(text == name or text.startswith(name + " ") for name in ESTIMATORS):
                yield f"{module.path}:{node.lineno} {node.value!r}"


def test_the_names_of_estimators_are_in_one_file() -> None:
    found = {module.name: list(estimator_names(module)) for module in modules()}
    assert len(found.pop("slime.algorithms")) == len(ESTIMATORS)
    elsewhere = [place for places in found.values() for place in places]
    assert not elsewhere, "ask the record of slime.algorithms: " + ", ".join(elsewhere)


def test_only_the_table_is_compared_with_the_chosen_estimator() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare | ast.Match)
        and "advantage_estimator" in ast.unparse(node.left if isinstance(node, ast.Compare) else node.subject)
    ]
    assert not found, "ask the record of slime.algorithms: " + ", ".join(found)
