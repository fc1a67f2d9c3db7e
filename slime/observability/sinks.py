"""The destinations of metrics: ``metrics.jsonl``, the log, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import secrets
import time
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slime.observability.run_info import hide_secrets
from slime.utils.errors import ConfigError


class JsonlSink:
    """Appends ``{"time": seconds, "step_key": "train/step", "train/step": 3, "train/loss": 0.1, ...}`` per record.

    For scripts and notebooks: needs no library. NaN and infinities, which JSON lacks, become null. A resumed run of the
    same name appends to the same file.
    """

    def __init__(self, path: Path) -> None:
        ends_torn = _ends_torn(path)
        # text in a user's metric may hold half of a character
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        # A record after the torn line would be lost with it.
        if ends_torn:
            self._file.write("\n")

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        record = {"time": round(time.time(), 3), "step_key": step_key, step_key: step}
        record |= {name: _json(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()  # readable during the run, complete if the run is killed

    def close(self) -> None:
        self._file.close()


def _ends_torn(path: Path) -> bool:
    """Whether the last line is incomplete because its process was killed."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _json(value: Any) -> Any:
    if isinstance(value, float):
        # JSON lacks NaN and infinities.
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str) or value is None else str(value)


logger = logging.getLogger(__name__)
_lines = logging.getLogger("slime.observability.metric_lines")

_CRITIC = "train/critic-"


class LogSink:
    """Lines of the log, for scripts that grep them: ``rollout 3: {...}``, ``perf 3: {...}``, ``step 7: {...}``.

    One line per record and kind. Names keep their prefix.
    """

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        kinds: dict[str, dict[str, Any]] = {}
        for name, value in metrics.items():
            kinds.setdefault(_kind(name), {})[name] = value
        for kind, values in kinds.items():
            _lines.info("%s %d: %s", kind, step, values)

    def close(self) -> None:
        """Does nothing, because no file is open."""


def _kind(name: str) -> str:
    prefix = name.split("/", maxsplit=1)[0]
    if prefix == "train":
        return "critic-step" if name.startswith(_CRITIC) else "step"
    return prefix


class TensorboardSink:
    """TensorBoard event files: scalars under their metric's name. The first record creates the file."""

    # tensorboard's writer, because torch's writer would import torch in the driver

    def __init__(self, directory: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError("event files need the package tensorboard: pip install tensorboard.")
        self._directory = directory
        self._writer: Any = None

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if isinstance(value, int | float)
        ]
        if not values:
            return
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._directory))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        # Curves must be visible during the run.
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


AXES = {
    "train/*": "train/step",
    "rollout/*": "rollout/step",
    "perf/*": "rollout/step",
    "multi_turn/*": "rollout/step",
    "passrate/*": "rollout/step",
    "eval/*": "eval/step",
}
"""Metric glob -> the metric on its x axis."""


class WandbSink:
    """A run of Weights & Biases (``--use-wandb``). The driver alone logs, so one plain run is enough."""

    def __init__(self, args: Namespace) -> None:
        wandb = _library()
        mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        try:
            self._run = _start(wandb, args, mode)
        except Exception as error:
            # Offline runs need no server: the error is in the settings.
            if mode != "online":
                raise
            logger.warning("W&B cannot be reached, the run is logged offline (wandb sync sends it later): %s", error)
            self._run = _start(wandb, args, "offline")
        for axis in sorted(set(AXES.values())):
            self._run.define_metric(axis)
        for glob, axis in AXES.items():
            self._run.define_metric(glob, step_metric=axis)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        # The step is a metric too, because the axes advance independently.
        self._run.log({**metrics, step_key: step})

    def close(self) -> None:
        self._run.finish()


def _start(wandb: Any, args: Namespace, mode: str) -> Any:
    if mode == "online" and args.wandb_key:
        wandb.login(key=args.wandb_key, host=args.wandb_host)
    run_id = args.wandb_run_id or secrets.token_hex(4)
    group = args.wandb_group or args.experiment_name or "run"
    name = group
    if args.wandb_random_suffix:
        group = f"{group}_{run_id}"
        name = f"{group}-RANK_{args.rank}"
    return wandb.init(
        id=run_id,
        mode=mode,
        dir=args.wandb_dir,
        entity=args.wandb_team,
        project=args.wandb_project or "slime",
        group=group,
        name=name,
        config=_config(args),
        resume="allow",
    )


def _config(args: Namespace) -> dict[str, Any]:
    config: dict[str, Any] = hide_secrets(copy.deepcopy(vars(args)))
    if "SLURM_JOB_ID" in os.environ:
        config["env_vars"] = {"SLURM_JOB_ID": os.environ["SLURM_JOB_ID"]}
    return config


def _library() -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "--use-wandb needs the package wandb: pip install 'slime[wandb]', or drop the flag."
        ) from None
    return wandb
