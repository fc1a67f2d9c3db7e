"""The sources that the architecture tests inspect: every module of slime, parsed once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Module", "modules"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: dotted name.
        path: relative to the repository.
        room: ``utils``, ``backends`` for its protocols, ``backends/sglang_utils``, or empty for ``slime`` itself.
    """

    name: str
    path: Path
    room: str
    source: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.source.splitlines())

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of every import statement, also those inside functions and under ``TYPE_CHECKING``.

        ``from a import b`` gives ``a.b``: whether b is a module does not matter to the rules.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self._absolute(node)
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts if self.path.name == "__init__.py" else parts[:-1]
        base = package[: len(package) - (node.level - 1)]
        return ".".join([*base, *([node.module] if node.module else [])])


def room_of(dotted: str) -> str:
    """``slime.backends.sglang_utils.engine`` -> ``backends/sglang_utils``, ``slime.backends.Piece`` -> ``backends``."""
    parts = dotted.split(".")[1:]
    if parts[:1] == ["backends"] and (ROOT / "slime" / "/".join(parts[:2])).is_dir():
        return "/".join(parts[:2])
    return parts[0] if parts else ""


@functools.cache
def modules(package: str = "slime") -> tuple[Module, ...]:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.is_relative_to("slime/new/task"):
            continue  # files of a user's task, which slime new copies
        parts = list(relative.with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        found.append(Module(name, relative, room_of(name), source, ast.parse(source, str(relative))))
    return tuple(found)
