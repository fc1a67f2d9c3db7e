"""Allowed imports between rooms, and modules that reading flags must not import. Lazy imports count."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap

import pytest

from slime.compat import ALIASES, AliasFinder
from tests.architecture.sources import ROOT, Module, modules, room_of

EVERYTHING = "*"
BELOW_TRAINER = [
    "backends",
    "algorithms",
    "batch",
    "data",
    "config",
    "models",
    "hooks",
    "utils",
    "observability",
    "weight_sync",
]

# Room -> rooms of slime it may import, itself included by rule.
MAY_IMPORT: dict[str, list[str]] = {
    "": ["api", "compat"],
    "api": [EVERYTHING],
    "compat": [EVERYTHING],
    "utils": [],
    "models": ["utils"],
    "config": ["algorithms", "models", "utils"],
    "data": ["models", "utils"],
    "hooks": ["utils", "data"],
    "algorithms": [],
    "batch": ["algorithms", "data", "config", "models", "utils"],
    "observability": ["algorithms", "data", "utils", "config"],
    "rollout": ["data", "config", "hooks", "utils", "observability"],
    "backends": [],
    "weight_sync": ["backends", "data", "config", "models", "utils"],
    "backends/sglang_utils": ["backends", "data", "config", "models", "utils", "observability"],
    "backends/training": BELOW_TRAINER,
    "backends/megatron_utils": [*BELOW_TRAINER, "backends/training"],
    "backends/fsdp_utils": [*BELOW_TRAINER, "backends/training"],
    "ray": [EVERYTHING],
    "agent": ["rollout", "data", "utils", "observability"],
    "environments": ["agent", "rollout", "data", "hooks", "utils"],
    "testing": ["config", "ray", "rollout", "batch", "data", "hooks", "utils"],
    "doctor": [EVERYTHING],
    "replay": [EVERYTHING],
    "board": ["data", "observability", "models", "utils"],
    "new": [],
    "cli": [EVERYTHING],
    "__main__": ["cli"],
}

# Third-party package -> the only rooms that may import it.
THIRD_PARTY: dict[str, list[str]] = {
    "ray": ["ray"],
    "sglang": ["backends/sglang_utils", "agent"],
    "aiohttp": ["agent", "backends/megatron_utils"],
    "sglang_router": ["backends/sglang_utils"],
    "megatron": ["backends/megatron_utils"],
    "tensorboard": ["observability"],
    "wandb": ["observability"],
    "yaml": ["config"],
    "rich": ["config", "doctor"],
    "peft": ["backends/fsdp_utils"],
    "transformers": [
        "data",
        "rollout",
        "backends/fsdp_utils",
        "backends/megatron_utils",
        "backends/sglang_utils",
        "doctor",
    ],
    "httpx": ["utils", "rollout", "environments", "backends/sglang_utils", "doctor"],
}

# Modules of `utils` that may import torch. Other modules of `utils` may not, nor any of `config`, `hooks`, `models`.
TORCH_IN_UTILS = ("slime.utils.accelerator", "slime.utils.distributed_utils", "slime.utils.memory_utils")
TORCH_NEVER = ("config", "hooks", "models")

# Exceptions that exist today: "module -> imported". May only shrink.
ALLOWED: dict[str, str] = {}


def violations(module: Module) -> list[str]:
    found = []
    for line, name in module.imports():
        top = name.split(".")[0]
        why = ""
        if top == "slime" and room_of(name) != module.room:
            allowed = MAY_IMPORT.get(module.room, [])
            if EVERYTHING not in allowed and room_of(name) not in allowed:
                why = f"room {module.room or 'slime'} may import only {', '.join(allowed) or 'nothing'} from slime"
        elif top in THIRD_PARTY and module.room not in THIRD_PARTY[top]:
            why = f"{top} may be imported only in {', '.join(THIRD_PARTY[top])}"
        elif top == "torch" and not may_import_torch(module):
            why = "torch may not be imported here"
        if why and ALLOWED.get(module.name) != name:
            found.append(f"{module.path}:{line} imports {name}: {why}")
    return found


def may_import_torch(module: Module) -> bool:
    if module.room == "utils":
        return module.name.startswith(TORCH_IN_UTILS)
    return module.room not in TORCH_NEVER


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_a_room_imports_only_what_the_table_allows(module: Module) -> None:
    assert not violations(module), "\n".join(violations(module))


def test_every_room_is_in_the_table() -> None:
    assert {module.room for module in modules()} <= set(MAY_IMPORT)


def test_no_room_imports_an_alias() -> None:
    finder = AliasFinder(ALIASES)
    aliases = {*finder.names, *finder.same}
    found = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        for line, name in module.imports()
        if name in aliases or name.rpartition(".")[0] in aliases
    ]
    assert not found, "\n".join(found)


def test_every_alias_leads_to_a_name_that_exists() -> None:
    from slime.backends.megatron_utils.patches import install

    install()  # an alias may import megatron.core, which must come after it
    finder = AliasFinder(ALIASES)
    files = {module.name for module in modules()}
    assert not files & {*finder.names, *finder.same}, "a file hides its alias"
    missing = [
        f"{path}.{name} -> {origin}"
        for path, names in finder.names.items()
        for name, origin in names.items()
        if not hasattr(importlib.import_module(path), name)
    ]
    assert not missing, "\n".join(missing)
    for path, other in finder.same.items():
        assert importlib.import_module(path) is importlib.import_module(other)
        assert importlib.import_module(other).__spec__.name == other


def test_an_alias_wins_over_the_folder_that_a_removed_package_leaves(tmp_path) -> None:
    (tmp_path / "megatron_to_hf" / "__pycache__").mkdir(parents=True)
    program = (
        "import sys, slime.backends.megatron_utils as room; room.__path__.append(sys.argv[1]); "
        "import slime.backends.megatron_utils.megatron_to_hf as found; print(found.__all__)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "convert_to_hf" in done.stdout, done.stderr


def test_the_exceptions_are_still_needed() -> None:
    imported = {(module.name, name) for module in modules() for _, name in module.imports()}
    assert set(ALLOWED.items()) <= imported, "an exception is no longer needed: remove it"


def test_the_table_is_free_of_cycles() -> None:
    remaining = {room: {other for other in allowed if other != EVERYTHING} for room, allowed in MAY_IMPORT.items()}
    while remaining:
        leaves = [room for room, needs in remaining.items() if not needs & set(remaining)]
        assert leaves, f"these rooms need one another: {sorted(remaining)}"
        for room in leaves:
            del remaining[room]


def test_the_rule_catches_what_it_forbids() -> None:
    source = "def f():\n    from slime.ray.run import loop\n    import megatron.core\n    from ..ray.rollout import x\n"
    module = next(m for m in modules() if m.name == "slime.batch")
    bad = Module("slime.batch.bad", module.path.with_name("bad.py"), "batch", source, ast.parse(source))
    assert [text.split(" imports ")[1].split(":")[0] for text in violations(bad)] == [
        "slime.ray.run.loop",
        "megatron.core",
        "slime.ray.rollout.x",
    ]


@pytest.mark.parametrize("question", ["cuda.is_available", "version.cuda"])
def test_only_the_accelerator_asks_what_the_device_is(question: str) -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        if module.room != "utils"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(question)
    ]
    assert not found, "use slime.utils.accelerator: " + ", ".join(found)


def test_flags_are_declared_without_importing_a_heavy_library() -> None:
    """``train.py --help`` answers in about a second, on machines without any of the engines."""
    names = [m.name for m in modules() if m.room == "config" or m.path.name == "arguments.py"]
    program = textwrap.dedent(f"""
        import importlib, sys
        for name in {names!r}:
            importlib.import_module(name)
            heavy = [top for top in ("torch", "ray", "megatron", "sglang", "transformers") if top in sys.modules]
            assert not heavy, f"importing {{name}} imported {{heavy}}"
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_driver_imports_no_torch() -> None:
    """Its import takes two seconds of every start of a run, and no step of the driver needs a tensor."""
    program = """
        import sys
        from slime.ray.run import main, cluster, restart, start
        assert not {"torch", "transformers", "sglang"} & {*sys.modules}, "start with: python -X importtime"
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
