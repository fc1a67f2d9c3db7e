"""House rules that can be counted. The allow-lists may only shrink: an entry that is not needed fails the test."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, Module, modules

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_DRIVER_LINES = 120

# path -> lines it has today.
LONG_FILES: dict[str, int] = {}
# path::function -> lines it has today.
LONG_FUNCTIONS: dict[str, int] = {}


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """(path::Class.function, lines without the docstring) of every function, nested ones included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module.path}::{prefix}{child.name}", lines_of_code(child)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(module.tree, "")


def lines_of_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    total = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        total -= first.end_lineno - first.lineno + 1
    return total


def too_long(measured: dict[str, int], limit: int, allowed: dict[str, int]) -> list[str]:
    problems = [
        f"{name}: {lines} lines, the limit is {allowed.get(name, limit)}"
        for name, lines in measured.items()
        if lines > allowed.get(name, limit)
    ]
    problems += [f"{name} is gone: remove it from the allow-list" for name in allowed if name not in measured]
    problems += [
        f"{name}: {measured[name]} lines now: lower or remove its entry in the allow-list"
        for name, lines in allowed.items()
        if name in measured and measured[name] < lines
    ]
    return problems


def test_a_file_has_one_subject() -> None:
    measured = {str(module.path): module.num_lines for module in modules()}
    assert not (problems := too_long(measured, MAX_FILE_LINES, LONG_FILES)), "\n".join(problems)


def test_a_function_fits_on_a_screen() -> None:
    measured = dict(item for module in modules() for item in functions(module))
    assert not (problems := too_long(measured, MAX_FUNCTION_LINES, LONG_FUNCTIONS)), "\n".join(problems)


def test_the_allow_list_may_only_shrink() -> None:
    assert too_long({"a": 50}, 40, {}) == ["a: 50 lines, the limit is 40"]
    assert too_long({"a": 50}, 40, {"a": 50}) == []
    assert too_long({"a": 45}, 40, {"a": 50}) == ["a: 45 lines now: lower or remove its entry in the allow-list"]
    assert too_long({}, 40, {"a": 50}) == ["a is gone: remove it from the allow-list"]


@pytest.mark.parametrize("driver", ["train.py", "slime/ray/run/main.py"])
def test_the_driver_tells_the_story_in_under_a_hundred_lines(driver: str) -> None:
    assert len((ROOT / driver).read_text(encoding="utf-8").splitlines()) < MAX_DRIVER_LINES


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_a_module_says_what_it_owns(module: Module) -> None:
    if module.tree.body:
        assert ast.get_docstring(module.tree), f"{module.path} has no module docstring"


@pytest.mark.parametrize("module", [m for m in modules() if "__all__" in m.source], ids=lambda module: module.name)
def test_a_list_of_public_names_is_true(module: Module) -> None:
    listed = public_names(module)
    bound = set(names_bound(module.tree))
    if listed is None or "__getattr__" in bound:
        return
    assert set(listed) <= bound, f"{module.path}: {sorted(set(listed) - bound)} do not exist"


def public_names(module: Module) -> list[str] | None:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value)) if isinstance(node.value, ast.List | ast.Tuple) else None
    return None


def names_bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines, assigns or imports, conditions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def test_nothing_names_the_place_where_it_was_made() -> None:
    """Paths of a developer's machine do not belong into the project."""
    mine = ("/work/", "/home/")
    texts = [path for folder in ("slime", "tools", "examples", "docs") for path in (ROOT / folder).rglob("*")]
    found = [
        str(path.relative_to(ROOT))
        for path in [*texts, ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
        if path.suffix in {".py", ".md", ".toml", ".sh", ".txt", ""} and path.is_file() and has_any(path, mine)
    ]
    assert not found, found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_git_ignores_no_source() -> None:
    """A pattern such as ``dist/`` without its leading slash keeps ``tests/dist`` out of every clone."""
    command = [
        "git",
        "ls-files",
        "--others",
        "--ignored",
        "--exclude-standard",
        "--",
        "slime",
        "slime_plugins",
        "tests",
    ]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line for line in ignored.splitlines() if "__pycache__" not in line] == []


def has_any(path: Path, needles: tuple[str, ...]) -> bool:
    text = path.read_text(encoding="utf-8", errors="ignore")
    return any(needle in text for needle in needles)
