"""A ``--sglang-config`` file as plain values, for launch scripts and plugins that read or write one.

slime itself uses ``topology``, which fills in every default.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from slime.backends.sglang_utils.topology import WorkerType, read_topology
from slime.config.yaml_file import read_mapping
from slime.utils.errors import ConfigError

_FLAG = "--sglang-config"
_PD = (WorkerType.PREFILL, WorkerType.DECODE)


@dataclass
class ServerGroupConfig:
    """Engines of one kind. None: absent from the file."""

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    """One model and the groups that serve it. None: absent from the file."""

    name: str
    model_path: str | None = None
    num_gpus_per_engine: int | None = None
    server_groups: list[ServerGroupConfig] = field(default_factory=list)
    update_weights: bool | None = None

    @property
    def has_pd_disaggregation(self) -> bool:
        return any(group.worker_type in _PD for group in self.server_groups)

    @property
    def has_encoder_disaggregation(self) -> bool:
        return any(group.worker_type == WorkerType.ENCODER for group in self.server_groups)

    @property
    def total_num_gpus(self) -> int:
        return sum(group.num_gpus for group in self.server_groups)

    def resolve(self, args: Namespace) -> None:
        """Derive missing fields from ``args``: widths, the path of the weights, and whether they are trained.

        Raises:
            ConfigError: the groups serve different weights.
        """
        for group in self.server_groups:
            group.num_gpus_per_engine = (
                group.num_gpus_per_engine or self.num_gpus_per_engine or args.rollout_num_gpus_per_engine
            )
            group.overrides.setdefault("model_path", self.model_path or args.hf_checkpoint)
        paths = {str(group.overrides["model_path"]) for group in self.server_groups}
        if len(paths) > 1:
            raise ConfigError(f"model {self.name}: its groups serve different models: {', '.join(sorted(paths))}.")
        self.model_path = paths.pop() if paths else self.model_path or args.hf_checkpoint
        if self.update_weights is None:
            self.update_weights = self.model_path == args.hf_checkpoint


@dataclass
class SglangConfig:
    """All models of a run. Requests without a model's name go to the first."""

    models: list[ModelConfig]

    @classmethod
    def from_yaml(cls, path: str) -> SglangConfig:
        """Read a file.

        Raises:
            ConfigError: with every problem of it.
        """
        read_topology(path, hf_checkpoint="", num_gpus_per_engine=1)  # raises the problems
        return cls([_model(entry) for entry in read_mapping(_FLAG, path)["sglang"]])

    @classmethod
    def from_prefill_num_servers(cls, args: Namespace) -> SglangConfig:
        """The configuration that ``--prefill-num-servers`` abbreviates."""
        num_prefill = args.prefill_num_servers * args.rollout_num_gpus_per_engine
        sizes = {WorkerType.PREFILL: num_prefill, WorkerType.DECODE: args.rollout_num_gpus - num_prefill}
        if min(sizes.values()) <= 0:
            raise ConfigError(
                f"--prefill-num-servers {args.prefill_num_servers} must leave some of --rollout-num-gpus "
                f"{args.rollout_num_gpus} to decode with, and be at least 1."
            )
        return cls([ModelConfig("default", server_groups=[ServerGroupConfig(*item) for item in sizes.items()])])

    @property
    def has_pd_disaggregation(self) -> bool:
        return any(model.has_pd_disaggregation for model in self.models)

    @property
    def total_num_gpus(self) -> int:
        """Number of devices, those of placeholders included."""
        return sum(model.total_num_gpus for model in self.models)


def _model(entry: dict[str, Any]) -> ModelConfig:
    # two names of the same key, as in topology
    groups = entry.get("server_groups") or entry.get("engine_groups") or []
    return ModelConfig(
        name=entry["name"],
        model_path=entry.get("model_path"),
        num_gpus_per_engine=entry.get("num_gpus_per_engine"),
        server_groups=[_group(group) for group in groups],
        update_weights=entry.get("update_weights"),
    )


def _group(entry: dict[str, Any]) -> ServerGroupConfig:
    overrides = {name.replace("-", "_"): value for name, value in (entry.get("overrides") or {}).items()}
    return ServerGroupConfig(entry["worker_type"], entry["num_gpus"], entry.get("num_gpus_per_engine"), overrides)
