"""A machine with a GPU installs what requirements.txt lists: that must be all that slime imports."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]

ASKED_FOR = {
    "blake3": "a rule names it",
    "datasets": "an extra",
    "deep_gemm": "flags for GPUs name it",
    "e2b": "the sandbox names it",
    "mcp": "an extra",
    "openenv": "an extra",
    "memray": "--memory-recorder names it",
    "pandas": "an extra",
    "qwen_vl_utils": "only pictures of Qwen's older processors",
    "reasoning_gym": "an extra",
    "torch_musa": "noticed only",
    "triton": "torch for CUDA requires it",
    "verifiers": "an extra",
    "wandb": "an extra",
    "websockets": "openenv requires it",
}
"""Packages that a run needs only for certain flags, or whose absence it handles."""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required() -> set[str]:
    """Packages of requirements.txt and of its pins, one level deep."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    direct = [Requirement(line) for line in lines if not line.startswith("#")]
    theirs = [Requirement(line) for each in direct for line in importlib.metadata.requires(each.name) or ()]
    deeper = [each for each in theirs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {_normal(each.name) for each in (*direct, *deeper)}


def _imported() -> dict[str, str]:
    """Top-level module -> a file of slime that imports it."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        if path.is_relative_to(ROOT / "slime" / "new" / "task"):
            continue  # the template of a user's folder
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module]
            found |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names and name != "slime"}


def test_every_package_that_slime_imports_comes_with_the_installation():
    packages = importlib.metadata.packages_distributions()
    required = _required()
    lacking = {
        name: path
        for name, path in _imported().items()
        if name not in ASKED_FOR and not required & {_normal(package) for package in packages.get(name, [name])}
    }
    assert not lacking
