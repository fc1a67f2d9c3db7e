"""Counts that may only improve. A number that got better is a reason to lower its limit in the table below."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable

import pytest

from tests.architecture.sources import ROOT, Module, modules

# Name of a measure -> today's number. Measures in LEAST must not fall below it, all others must not exceed it.
LIMITS: dict[str, float] = {
    "files": 325,
    "lines": 76772,
    "small files, %": 12.31,
    "functions that take args, %": 2.99,
    "writes to args": 0,
    "getattr and hasattr per 1000 lines": 0.86,
    "broad except per 1000 lines": 0.37,
    "comments per 1000 lines": 36,
    "modules imported by one file": 20,
    "longest import chain": 12,
    "import cycles": 0,
    "prose: nobody, somebody, whoever": 0.06,
    "prose: 'what ...' as a noun": 0.3,
    "prose: 'where ...' for 'if'": 0.3,
    "prose: code that says or is told": 0.1,
    "prose: of one's own": 0.06,
    "prose: stands, behind": 0.2,
    "prose: is no X": 0.5,
    "prose: semicolons": 5,
}
LEAST = ("comments per 1000 lines",)

# Rooms and files whose functions take the whole namespace by design: parsing, rules and users' hooks.
TAKE_ARGS = re.compile(r"slime/(config|hooks|compat)/|(^|/|_)(rules|arguments)(\.py|/)")
SMALL_FILE = 50  # lines of code

# Phrases that make technical prose hard to read, in docstrings and comments.
PROSE = {
    "nobody, somebody, whoever": r"\b(nobody|somebody|whoever|anybody|whosoever)\b",
    "'what ...' as a noun": (
        r"\b[Ww]hat (a|an|the|is|it|was|they|users|one|comes|follows|becomes|has|had|can|may|will)\b"
    ),
    "'where ...' for 'if'": r"\b[Ww]here (it|there|no|one|nothing|a|the|this|that) ",
    "code that says or is told": (
        r"\b(is told|are told|tells|says so|is said|says (how|what|which|who|whether|where))\b"
    ),
    "of one's own": r"\bof (one's|its|their|our|your) own\b",
    "stands, behind": r"\b(stands?|behind)\b",
    "is no X": r"\b(is|are|was) no (?!longer\b|more\b)",
    "semicolons": r";",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def nodes() -> list[tuple[Module, ast.AST]]:
    return [(module, node) for module in modules() for node in ast.walk(module.tree)]


@functools.cache
def num_lines() -> int:
    return sum(module.num_lines for module in modules())


def per_1000_lines(count: int) -> float:
    return 1000 * count / num_lines()


def code_lines(module: Module) -> int:
    """Lines with code: without blank lines, comments, docstrings and imports."""
    skipped: set[int] = set()
    for node in ast.walk(module.tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(module.source.splitlines(), start=1)
    return sum(
        1 for number, line in lines if number not in skipped and line.strip() and not line.strip().startswith("#")
    )


def small_files() -> float:
    return 100 * sum(code_lines(module) <= SMALL_FILE for module in modules()) / len(modules())


def functions_taking_args() -> float:
    found = [(module, node) for module, node in nodes() if isinstance(node, Function)]
    counted = [node for module, node in found if not TAKE_ARGS.search(str(module.path))]
    return 100 * sum(any(arg.arg == "args" for arg in parameters(node)) for node in counted) / len(counted)


def parameters(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def writes_to_args() -> float:
    """Assignments to ``args.x`` outside of the rooms that resolve arguments."""
    return sum(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in ("args", "self._args", "self.args", "run.args")
        and not TAKE_ARGS.search(str(module.path))
        for module, node in nodes()
    )


def reflection() -> float:
    calls = (node.func for _, node in nodes() if isinstance(node, ast.Call))
    return per_1000_lines(sum(isinstance(func, ast.Name) and func.id in ("getattr", "hasattr") for func in calls))


def broad_excepts() -> float:
    def is_broad(handler: ast.ExceptHandler) -> bool:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)

    return per_1000_lines(sum(isinstance(node, ast.ExceptHandler) and is_broad(node) for _, node in nodes()))


@functools.cache
def comments() -> list[str]:
    tokens = (token for m in modules() for token in tokenize.generate_tokens(io.StringIO(m.source).readline))
    return [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]


@functools.cache
def graph(*, with_lazy: bool) -> dict[str, set[str]]:
    """Module -> modules of slime that it imports. Without lazy imports only those at the top level of the file."""
    names = {module.name for module in modules()}
    found: dict[str, set[str]] = {}
    for module in modules():
        top = {node.lineno for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
        imported = (name for line, name in module.imports() if with_lazy or line in top)
        targets = {name if name in names else name.rpartition(".")[0] for name in imported if name.startswith("slime")}
        found[module.name] = (targets & names) - {module.name}
    return found


def fan_out() -> float:
    return max(map(len, graph(with_lazy=False).values()))


def longest_chain() -> float:
    imports = graph(with_lazy=False)

    @functools.cache
    def depth(name: str) -> int:
        return 1 + max(map(depth, imports[name]), default=0)

    return max(map(depth, imports))


def cycles() -> float:
    """Groups of modules that import one another, lazy imports included (Tarjan's algorithm)."""
    imports = graph(with_lazy=True)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            cut = stack.index(name)
            found.append(set(stack[cut:]))
            del stack[cut:]

    for name in imports:
        if name not in index:
            visit(name)
    return sum(len(group) > 1 for group in found)


@functools.cache
def prose() -> str:
    """All docstrings and comments of the package."""
    documented = (node for _, node in nodes() if isinstance(node, ast.Module | ast.ClassDef | Function))
    texts = [ast.get_docstring(node) or "" for node in documented]
    return "\n".join([*texts, *comments()])


def rate(pattern: str) -> float:
    """Hits per 1000 words."""
    return 1000 * len(re.findall(pattern, prose())) / len(prose().split())


MEASURES: dict[str, Callable[[], float]] = {
    "files": lambda: len(modules()),
    "lines": num_lines,
    "small files, %": small_files,
    "functions that take args, %": functions_taking_args,
    "writes to args": writes_to_args,
    "getattr and hasattr per 1000 lines": reflection,
    "broad except per 1000 lines": broad_excepts,
    "comments per 1000 lines": lambda: per_1000_lines(len(comments())),
    "modules imported by one file": fan_out,
    "longest import chain": longest_chain,
    "import cycles": cycles,
    **{f"prose: {name}": functools.partial(rate, pattern) for name, pattern in PROSE.items()},
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_count_does_not_get_worse(name: str) -> None:
    measured, limit = round(MEASURES[name](), 2), LIMITS[name]
    if name in LEAST:
        assert measured >= limit, f"{name}: {measured:g} is less than {limit:g}"
    else:
        assert measured <= limit, f"{name}: {measured:g} is more than {limit:g}"


def test_every_limit_has_a_measure() -> None:
    assert LIMITS.keys() == MEASURES.keys()


def test_the_page_of_the_architecture_shows_the_limits() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (?:at least )?([\d.]+) \|", (ROOT / "docs/architecture.md").read_text("utf-8"), re.M
    )
    assert {name: float(limit) for name, limit in rows if name in LIMITS} == LIMITS
