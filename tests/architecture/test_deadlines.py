"""The table of deadlines in docs/reliability.md names every wait of a run with its default, and nothing else.

A deadline is a flag with "timeout" or "first_wait" in its name, a module constant of seconds, or a parameter with
"timeout" in its name and a number as its default. Constants whose names end as in ``NO_WAIT`` are no waits.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
from collections.abc import Iterator

import pytest

from slime.config.groups import flag_of
from slime.config.parse import build_parser
from slime.ray.arguments import GROUPS
from tests.architecture.sources import ROOT, modules

PAGE = ROOT / "docs" / "reliability.md"
BESIDE_A_RUN = ("board", "doctor", "replay", "testing")
# Pauses, intervals, ages, and parts of a sum.
NO_WAIT = re.compile(
    r"_(EVERY|POLL|SLICE|BACKOFF|DELAY|REPEAT|AGE|KEEPALIVE|HEARTBEAT|AFTER|PAUSE|PAUSES|SOON|AVOIDED|READY)_S$"
)
OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}
LITERAL_FREE = ("ray", "rollout", "utils", "backends/sglang_utils")


def number(node: ast.expr | None, known: dict[str, float]) -> float | None:
    """The value of a constant expression over constants of the module. None for anything else."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id=name):
            return known.get(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            sides = number(left, known), number(right, known)
            return None if None in sides else OPERATORS[type(op)](*sides)
    return None


def sources() -> Iterator[tuple[str, ast.Module]]:
    for module in modules():
        name = module.path.relative_to("slime").as_posix()
        if name.partition("/")[0] not in BESIDE_A_RUN:
            yield name, module.tree


def of_module(name: str, tree: ast.Module) -> dict[str, float]:
    known: dict[str, float] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = number(node.value, known)
            if value is not None:
                known[node.targets[0].id] = value
    found = {
        f"{name} {key}": value
        for key, value in known.items()
        if key.endswith("_S") and not key.endswith("_PER_S") and not NO_WAIT.search(key)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and "timeout" in ast.unparse(node.target) and number(node.value, {}):
            found[f"{name} __init__({ast.unparse(node.target)})"] = float(
                ast.literal_eval(node.value)
            )  # of a dataclass
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        plain = [*node.args.posonlyargs, *node.args.args]
        pairs = [
            *zip(reversed(plain), reversed(node.args.defaults), strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if "timeout" in argument.arg and isinstance(default, ast.Constant) and number(default, {}):
                found[f"{name} {node.name}({argument.arg})"] = float(default.value)  # type: ignore[arg-type]
    return found


def flags() -> dict[str, float | None]:
    actions: list[argparse.Action] = build_parser(GROUPS)._actions
    dests = {action.dest for action in actions if re.search("timeout|first_wait", action.dest)}
    # Without the last group: flags of Megatron that slime does not read.
    ours = {dest for group in GROUPS[:-1] for dest in vars(group).get("__dataclass_fields__", ())}
    return {flag_of(action.dest): action.default for action in actions if action.dest in dests & ours}


def table() -> dict[str, float | None]:
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- deadlines: begin -->")
    rows = [
        line.strip("|").split("|") for line in rest.partition("<!-- deadlines: end -->")[0].splitlines() if "`" in line
    ]
    found = {}
    for name, default, why in ((cell.strip() for cell in row) for row in rows):
        assert why, name
        value = default.split()[0].rstrip(":")
        found[name.replace("`", "")] = None if value == "none" else float(value)
    return found


def test_the_table_of_deadlines_is_that_of_the_code() -> None:
    in_code: dict[str, float | None] = dict(flags())
    for name, tree in sources():
        in_code |= of_module(name, tree)
    listed = table()
    missing = {name: value for name, value in in_code.items() if name not in listed}
    assert missing == {}, f"add rows to {PAGE.relative_to(ROOT)}, with the reason why each default holds"
    assert listed == in_code, f"{PAGE.relative_to(ROOT)} names other defaults, or deadlines that the code does not have"


@pytest.mark.parametrize("room", LITERAL_FREE)
def test_a_wait_of_a_run_has_no_deadline_without_a_name(room: str) -> None:
    nameless = [
        f"{name}:{node.lineno}"
        for name, tree in sources()
        if name.startswith(f"{room}/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg and "timeout" in keyword.arg and number(keyword.value, {})
    ]
    assert nameless == []


def test_a_new_constant_or_parameter_would_be_found() -> None:
    source = "_A_S = 5.0\n_B_TIMEOUT_S = 2 * _A_S\n_LOOK_EVERY_S = 1.0\ndef f(*, timeout_s=3): pass\n"
    assert of_module("x.py", ast.parse(source)) == {
        "x.py _A_S": 5.0,
        "x.py _B_TIMEOUT_S": 10.0,
        "x.py f(timeout_s)": 3.0,
    }
