"""Options of the installed SGLang server and router, without importing them.

``tools/make_engine_options.py`` writes the tables (``server_options.json``, ``router_options.json``) for one version
each. If another version is installed, the names are read from its source. The server's parser then checks options that
are not in the table.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

# Defaults that differ from the router's: groups of one prompt are long and alike, so the load is balanced earlier.
ROUTER_DEFAULTS = {
    "router_log_level": "warn",
    "router_balance_abs_threshold": 10,
    "router_balance_rel_threshold": 1.2,
}

# Values that the router supports but its parser refuses. consistent_hashing sends a session always to one engine.
EXTRA_POLICIES = {"router_policy": ("consistent_hashing",)}

# Field that slime computes -> its source.
CONTROLLED = {
    "model_path": "follows from --hf-checkpoint",
    "config": "could set any of these flags; use --custom-config-path for a file of flags",
    "random_seed": "follows from --seed",
    "enable_memory_saver": "follows from --offload-rollout",
    "enable_return_routed_experts": "follows from --use-rollout-routing-replay",
    "port": "is chosen by slime among the free ones",
    "nccl_port": "is chosen by slime among the free ones",
    "dist_init_addr": "is chosen by slime",
    "nnodes": "follows from --rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": "follows from --rollout-num-gpus-per-engine and --num-gpus-per-node",
    "gpu_id_step": "is decided by slime, which places the engines",
    "base_gpu_id": "is decided by slime, which places the engines",
    "host": "is the address of the engine's node; SLIME_HOST_IP on that node changes it",
}

# Field whose switch has no effect, because slime always sets it.
ALWAYS = {"trust_remote_code": "always on", "skip_server_warmup": "always on"}

# Option of an older server -> its present name, with the same meaning.
RENAMED = {
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--fp8-gemm-runner-backend": "--fp8-gemm-backend",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
}

# Option that no longer exists, or exists only in patched servers -> the replacement.
REMOVED = {
    "--enable-deepep-moe": "say --sglang-moe-a2a-backend deepep",
    "--enable-ep-moe": "say --sglang-ep-size N",
    "--disable-piecewise-cuda-graph": "there is no piecewise graph any more; --sglang-disable-prefill-cuda-graph",
    "--custom-pull-weights-pre-read-hook": "only a patched server has it",
    "--enable-fp32-moe-router": "only a patched server has it",
    "--release-hicache": "only a patched server has it",
}

# Attribute -> its second name, which is readable as well.
ALIASES = {
    "sglang_tp_size": "sglang_tensor_parallel_size",
    "sglang_dp_size": "sglang_data_parallel_size",
    "sglang_pp_size": "sglang_pipeline_parallel_size",
    "sglang_ep_size": "sglang_expert_parallel_size",
    "sglang_moe_dp_size": "sglang_moe_data_parallel_size",
}

_HERE = Path(__file__).resolve().parent
_NUMBER_WITH_SUFFIX = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Option:
    """One option of the engine's or the router's parser.

    Attributes:
        kind: ``value``, ``append`` (repeated ones add up), ``switch``, ``boolean`` (has ``--no-``), ``implies`` (its
            value turns ``dest`` on), or ``unknown`` (from the source of another version).
        nargs: as in argparse.
    """

    flags: tuple[str, ...]
    dest: str
    kind: str
    type: str = "str"
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None

    def value_of(self, words: list[str]) -> Any:
        """The words after the flag as one value. Raises ValueError with the reason."""
        match self.kind:
            case "unknown":
                return _guess(words)
            case "switch" | "boolean":
                if words:
                    raise ValueError(f"takes no value, got {' '.join(words)}")
                return True
            case "implies":
                self._convert(_only(words))
                return True
            case "value" | "append":
                return self._values(words)
            case _:
                raise AssertionError(self.kind)

    def _values(self, words: list[str]) -> Any:
        match self.nargs:
            case None:
                return self._convert(_only(words))
            case "?":
                return self._convert(_only(words)) if words else self.default
            case "*":
                return [self._convert(word) for word in words]
            case "+" if words:
                return [self._convert(word) for word in words]
            case int() as count if len(words) == count:
                return [self._convert(word) for word in words]
            case "+":
                raise ValueError("needs at least one value")
            case _:
                raise ValueError(f"needs {self.nargs} values, got {len(words)}")

    def _convert(self, word: str) -> Any:
        value = _as_type(self.type, word)
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{word} is not one of {', '.join(map(str, self.choices))}")
        return value


@dataclass(frozen=True)
class OptionTable:
    """The options of one program.

    Attributes:
        by_flag: every spelling, the ``--no-`` forms of booleans not included.
        defaults: field -> default, those without an option included.
        note: notice for the user if the table is for another version, else empty.
    """

    program: str
    by_flag: Mapping[str, Option]
    defaults: Mapping[str, Any]
    note: str = ""
    flags: tuple[str, ...] = field(default=())


@functools.cache
def server_options() -> OptionTable:
    """Options of the installed SGLang server."""
    data = _read("server_options.json")
    options = list(_options(data))
    installed = _installed("sglang")
    if installed in (None, data["version"]):
        return _table("SGLang server", options, data["fields"])
    names = _names_in_source()
    note = (
        f"SGLang {installed} is installed, the option table is for {data['version']}: options that only one of them "
        "has are not checked here"
    )
    kept = [option for option in options if not names or names.intersection(option.flags)]
    missing = names - {flag for option in options for flag in option.flags}
    news = [Option((flag,), flag[2:].replace("-", "_"), "unknown") for flag in sorted(missing)]
    return _table("SGLang server", kept + news, data["fields"], note)


@functools.cache
def router_options() -> OptionTable:
    """Options of the router, prefix included, with slime's defaults."""
    data = _read("router_options.json")
    installed = _installed("sglang_router")
    table = _table("router", list(_options(data)), {})
    note = "" if installed in (None, data["version"]) else f"router {installed} is installed, not {data['version']}"
    return OptionTable(table.program, table.by_flag, {**table.defaults, **ROUTER_DEFAULTS}, note, table.flags)


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_HERE / name).read_text(encoding="utf-8"))
    return data


def _options(data: dict[str, Any]) -> Iterator[Option]:
    for item in data["options"]:
        choices = item.get("choices")
        if choices is not None:
            item["choices"] = (*choices, *EXTRA_POLICIES.get(item["dest"], ()))
        yield Option(**item | {"flags": tuple(item["flags"])})


def _table(program: str, options: list[Option], fields: Mapping[str, Any], note: str = "") -> OptionTable:
    by_flag = {flag: option for option in options for flag in option.flags}
    defaults = {option.dest: option.default for option in options if option.kind not in ("implies", "unknown")}
    positive = tuple(flag for flag, option in by_flag.items() if not _is_negation(flag, option))
    return OptionTable(program, by_flag, {**fields, **defaults}, note, positive)


def _is_negation(flag: str, option: Option) -> bool:
    return option.kind == "boolean" and flag.startswith("--no-") and flag[5:].replace("-", "_") == option.dest


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _names_in_source() -> set[str]:
    """Option strings in the source of the installed server: all of them, and a few others."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return set()
    root = Path(next(iter(spec.submodule_search_locations))) / "srt"
    # Not imported: the import of SGLang takes ten seconds.
    flags: set[str] = set()
    for file in (root / "server_args.py", *(root / "arg_groups" / "fields").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        flags.update(re.findall(r"[\"'](--[a-z][a-z0-9-]+)[\"']", text))
        for node in ast.walk(ast.parse(text)):
            # an annotated field may be an option without a literal string
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                flags.add("--" + node.target.id.replace("_", "-"))
    return flags


def _only(words: list[str]) -> str:
    if len(words) != 1:
        raise ValueError("needs a value" if not words else f"takes one value, got {' '.join(words)}")
    return words[0]


def _as_type(name: str, word: str) -> Any:
    try:
        match name:
            case "str":
                return word
            case "str_or_none":
                return None if word in ("", "None") else word
            case "int":
                return int(word)
            case "float":
                return float(word)
            case "json":
                return json.loads(word)
            case "int_with_suffix":
                return _int_with_suffix(word)
            case _:
                raise AssertionError(f"unknown type {name} in the option table")
    except ValueError as error:
        detail = f": {error}" if name == "json" else ""
        kind = {"int": "an integer", "float": "a number", "json": "JSON"}.get(name, "an integer such as 4096 or 4k")
        raise ValueError(f"{word!r} is not {kind}{detail}") from None


def _int_with_suffix(word: str) -> int:
    match = _NUMBER_WITH_SUFFIX.fullmatch(word.strip())
    if match is None:
        return int(word)
    number, suffix = match.groups()
    value = Decimal(number) * _SUFFIXES.get(suffix or "", 1)
    # "1.5k" is allowed, "1.5Ki" and "2.0" are not
    if value != int(value) or ("." in number and (suffix is None or suffix.endswith("i"))):
        raise ValueError(word)
    return int(value)


def _guess(words: list[str]) -> Any:
    """The value of an option whose type is not known: JSON if it parses, else text."""
    values = []
    for word in words:
        try:
            values.append(json.loads(word))
        except json.JSONDecodeError:
            values.append(word)
    return True if not values else values[0] if len(values) == 1 else values
