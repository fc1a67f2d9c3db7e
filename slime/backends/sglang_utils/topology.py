"""The servers of a run: models, the groups of engines of each model, and the width of an engine.

The source is ``--sglang-config`` (a YAML file), ``--prefill-num-servers``, or the two device counts. The rules of the
command line and the wiring that starts engines use this module. It starts nothing.

    sglang:
      - name: actor                     unique, also the name of the model's router
        model_path: /models/x           default --hf-checkpoint
        num_gpus_per_engine: 2          default --rollout-num-gpus-per-engine
        update_weights: true            default: whether model_path is --hf-checkpoint
        server_groups:
          - worker_type: regular        regular | prefill | decode | encoder | placeholder (devices left alone)
            num_gpus: 4                 devices of the whole group
            num_gpus_per_engine: 2      default the model's
            overrides: {context_length: 8192}    fields of the server, above every flag
"""

from __future__ import annotations

import difflib
import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.backends.sglang_utils.option_table import REMOVED, RENAMED, server_options
from slime.config.yaml_file import read_mapping
from slime.utils.errors import ConfigError

_FLAG = "--sglang-config"
# Field that even an override cannot set -> the reason.
_NOT_HERE = {
    **dict.fromkeys(("host", "port", "nccl_port", "dist_init_addr"), "slime chooses the addresses"),
    **dict.fromkeys(("nnodes", "node_rank", "base_gpu_id", "gpu_id_step"), "slime places the engines"),
    "tp_size": "it follows from num_gpus_per_engine",
    **dict.fromkeys(
        ("disaggregation_mode", "disaggregation_bootstrap_port", "encoder_only"), "it follows from worker_type"
    ),
    "config": "it could set any field",
}


class WorkerType(StrEnum):
    """The role of the engines of a group."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    PLACEHOLDER = "placeholder"


@dataclass(frozen=True)
class ServerGroupSpec:
    """Engines of one kind.

    Attributes:
        num_gpus: devices of the whole group.
        num_gpus_per_engine: tensor-parallel times pipeline-parallel ranks of one engine.
        overrides: fields of the server, with underscores, above every other source.
    """

    worker_type: WorkerType
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type is WorkerType.PLACEHOLDER else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class EnginePlace:
    """One engine: its role and its devices.

    Attributes:
        rank: number of the engine in the run, through all models.
        first_slot: its first device, counted from the first device of all engines.
        num_gpus: devices, one after the other.
        overrides: server fields above every flag.
    """

    rank: int
    worker_type: WorkerType
    first_slot: int
    num_gpus: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def num_tensor_ranks(self, pp_size: int) -> int:
        """Ranks of one pipeline stage. ``pp_size``: --sglang-pp-size, which ``overrides`` may replace."""
        return self.num_gpus // num_stages(pp_size, self.overrides)

    def num_nodes(self, gpus_per_node: int) -> int:
        """Number of nodes. An engine on several nodes uses all devices of each."""
        return max(1, self.num_gpus // gpus_per_node)


@dataclass(frozen=True)
class ModelSpec:
    """One served model: one router, some groups.

    Attributes:
        updates_weights: False for a model that keeps the weights it was started with.
    """

    name: str
    model_path: str
    updates_weights: bool
    groups: tuple[ServerGroupSpec, ...]

    @property
    def has_pd(self) -> bool:
        """Whether prefill and decode run on different engines. The router needs a flag for this."""
        return any(group.worker_type in (WorkerType.PREFILL, WorkerType.DECODE) for group in self.groups)

    @property
    def num_answering(self) -> int:
        """Number of engines that answer requests."""
        # Prefill engines pass their requests on to decode engines.
        return sum(group.num_engines for group in self.groups if group.worker_type is not WorkerType.PREFILL)


@dataclass(frozen=True)
class Topology:
    """All models of a run. Requests without a model name go to the first one."""

    models: tuple[ModelSpec, ...]
    warnings: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        return sum(group.num_gpus for model in self.models for group in model.groups)

    def places(self, hf_checkpoint: str) -> dict[str, list[EnginePlace]]:
        """Model name -> its engines. Devices are assigned in the order of the file, also to placeholders."""
        found: dict[str, list[EnginePlace]] = {}
        rank = slot = 0
        for model in self.models:
            engines = found[model.name] = []
            path = {} if model.model_path == hf_checkpoint else {"model_path": model.model_path}
            for group in model.groups:
                # ranks count real engines only, slots also the devices of placeholders
                width = group.num_gpus_per_engine
                for first in range(slot, slot + group.num_engines * width, width):
                    engines.append(EnginePlace(rank, group.worker_type, first, width, path | dict(group.overrides)))
                    rank += 1
                slot += group.num_gpus
        return found


def num_stages(pp_size: int, overrides: Mapping[str, Any]) -> int:
    """Pipeline stages of an engine with these ``overrides``."""
    own = overrides.get("pp_size")
    return pp_size if own is None else int(own)


def topology_of(args: Namespace) -> Topology:
    """The servers of the command line. Raises ConfigError with every problem of the file."""
    width = args.rollout_num_gpus_per_engine
    if args.sglang_config is not None:
        return read_topology(args.sglang_config, hf_checkpoint=args.hf_checkpoint, num_gpus_per_engine=width)
    total = args.rollout_num_gpus or 0
    if args.prefill_num_servers is None:
        sizes = {WorkerType.REGULAR: total}
    else:
        prefill = args.prefill_num_servers * width
        sizes = {WorkerType.PREFILL: prefill, WorkerType.DECODE: total - prefill}
    groups = tuple(ServerGroupSpec(kind, size, width) for kind, size in sizes.items() if size > 0)
    return Topology((ModelSpec("default", args.hf_checkpoint, True, groups),))


def read_topology(path: str, *, hf_checkpoint: str, num_gpus_per_engine: int) -> Topology:
    """Read and validate the file that ``--sglang-config`` names.

    Args:
        hf_checkpoint: the model of entries without ``model_path``, which receive trained weights.
        num_gpus_per_engine: the width of engines without a width in the file.

    Raises:
        ConfigError: with every problem, each naming file, model, group and key.
    """
    root = read_mapping(_FLAG, path)
    entries = root.get("sglang")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{_FLAG} {path}: the root must be a mapping with the key sglang, a list of models.")
    reader = _Reader(path, hf_checkpoint, num_gpus_per_engine)
    for key in root.keys() - {"sglang"}:
        reader.warnings.append(f"{path}: key {key} is ignored; the root has one key, sglang")
    models = [reader.model(index, entry) for index, entry in enumerate(entries)]
    names = [model.name for model in models if model is not None]
    for name in {name for name in names if names.count(name) > 1}:
        reader.problems.append(
            f"{_FLAG} {path}: two models are named {name!r}; a name finds a router, so it is unique."
        )
    if reader.problems:
        raise ConfigError(reader.problems)
    return Topology(tuple(model for model in models if model is not None), tuple(reader.warnings))


class _Reader:
    """Collects every problem of a file instead of stopping at the first."""

    _MODEL_KEYS = ("name", "model_path", "num_gpus_per_engine", "server_groups", "engine_groups", "update_weights")
    _GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")

    def __init__(self, path: str, hf_checkpoint: str, num_gpus_per_engine: int) -> None:
        self.path = path
        self.hf_checkpoint = hf_checkpoint
        self.width = num_gpus_per_engine
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def model(self, index: int, entry: Any) -> ModelSpec | None:
        where = f"model {index}"
        if not isinstance(entry, dict):
            self._problem(where, f"must be a mapping, not {entry!r}.")
            return None
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            self._problem(where, f"key name: {name!r} must be the model's name; it is required.")
            return None
        where = f"model {name}"
        for key in entry.keys() - set(self._MODEL_KEYS):
            self.warnings.append(f"{self.path}: {where}: key {key} is ignored; known are {', '.join(self._MODEL_KEYS)}")
        path = str(entry.get("model_path") or self.hf_checkpoint)
        width = self._positive(where, "num_gpus_per_engine", entry.get("num_gpus_per_engine", self.width))
        groups = entry.get("server_groups") or entry.get("engine_groups") or []
        if not isinstance(groups, list):
            self._problem(where, f"key server_groups: {groups!r} must be a list.")
            return None
        specs = [
            spec
            for number, group in enumerate(groups)
            if (spec := self._group(f"{where}, group {number}", group, width))
        ]
        paths = {str(spec.overrides.get("model_path", path)) for spec in specs} or {path}
        if len(paths) > 1:
            self._problem(where, f"its groups serve different models: {', '.join(sorted(paths))}.")
            return None
        (path,) = paths
        return ModelSpec(name, path, self._updates(where, entry.get("update_weights"), path), tuple(specs))

    def _group(self, where: str, entry: Any, width: int | None) -> ServerGroupSpec | None:
        if not isinstance(entry, dict):
            self._problem(where, f"must be a mapping, not {entry!r}.")
            return None
        before = len(self.problems)
        for key in entry.keys() - set(self._GROUP_KEYS):
            self._problem(where, f"unknown key {key}; known are {', '.join(self._GROUP_KEYS)}.")
        kind, kinds = str(entry.get("worker_type")), [kind.value for kind in WorkerType]
        if kind not in kinds:
            self._problem(where, f"key worker_type: {kind!r} is not one of {', '.join(kinds)}.")
        size = self._positive(where, "num_gpus", entry.get("num_gpus"))
        if "num_gpus_per_engine" in entry:
            width = self._positive(where, "num_gpus_per_engine", entry["num_gpus_per_engine"])
        if size and width and size % width and kind != WorkerType.PLACEHOLDER:
            self._problem(where, f"key num_gpus: {size} must be a multiple of num_gpus_per_engine {width}.")
        overrides = self._overrides(where, entry.get("overrides") or {})
        if len(self.problems) > before or size is None or width is None:
            return None
        return ServerGroupSpec(WorkerType(kind), size, width, overrides)

    def _overrides(self, where: str, entry: Any) -> dict[str, Any]:
        if not isinstance(entry, dict):
            self._problem(where, f"key overrides: {entry!r} must be a mapping of server fields.")
            return {}
        found: dict[str, Any] = {}
        known = server_options().defaults
        for key, value in entry.items():
            flag = "--" + str(key).replace("_", "-")
            if str(key) not in known and flag not in server_options().by_flag and flag in REMOVED:
                self.warnings.append(f"{self.path}: {where}: overrides: {key} is dropped: {REMOVED[flag]}")
                continue
            name = _field_of(str(key))
            if name != key:
                self.warnings.append(f"{self.path}: {where}: overrides: {key} is read as {name}")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                hint = f" Did you mean {near[0]}?" if near else ""
                self._problem(where, f"overrides: the installed SGLang server has no field {name}.{hint}")
                continue
            if name in _NOT_HERE:
                self._problem(where, f"overrides: {name} cannot be set: {_NOT_HERE[name]}.")
                continue
            found[name] = value
            try:
                override_argv({name: value})
            except ValueError as error:
                self._problem(where, f"overrides: {name}: {error}.")
        return found

    def _updates(self, where: str, value: Any, path: str) -> bool:
        if isinstance(value, bool):
            return value
        if value is not None:
            self._problem(where, f"key update_weights: {value!r} is neither true nor false.")
        if path != self.hf_checkpoint:
            self.warnings.append(
                f"{self.path}: {where}: keeps its weights, because {path} is not --hf-checkpoint; say update_weights"
            )
        return path == self.hf_checkpoint

    def _positive(self, where: str, key: str, value: Any) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self._problem(where, f"key {key}: {value!r} must be a whole number of at least 1.")
        return None

    def _problem(self, where: str, text: str) -> None:
        self.problems.append(f"{_FLAG} {self.path}: {where}: {text}")


def _field_of(key: str) -> str:
    """The server field that ``key`` means: a name of the field, of its option, or of that option in an older server."""
    name = key.replace("-", "_")
    if name in server_options().defaults:
        return name
    flag = "--" + name.replace("_", "-")
    option = server_options().by_flag.get(RENAMED.get(flag, flag))
    return name if option is None or option.kind == "implies" else option.dest


def override_argv(overrides: Mapping[str, Any]) -> list[str]:
    """Server fields as words of its command line. Raises ValueError for a value that the field cannot have."""
    words: list[str] = []
    by_dest = {option.dest: option for option in server_options().by_flag.values() if option.kind != "implies"}
    for name, value in overrides.items():
        option = by_dest.get(name)
        if option is None:
            raise ValueError("it has no option on the server's command line")
        flag = option.flags[0]
        match value:
            case None:
                continue
            case bool() if option.kind in ("switch", "boolean"):
                words += [flag] if value else ["--no-" + flag[2:]] if option.kind == "boolean" else []
                continue
            case list() | tuple() if option.type != "json":  # several words, not one JSON list
                texts = [str(item) for item in value]
            case _:
                texts = [json.dumps(value) if option.type == "json" or isinstance(value, dict) else str(value)]
        option.value_of(texts)  # raises ValueError, so a bad value fails before an engine starts
        words += [flag, *texts] if len(texts) != 1 or not texts[0].startswith("-") else [f"{flag}={texts[0]}"]
    return words
