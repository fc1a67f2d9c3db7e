"""Weights & Biases, with ``--use-wandb`` only. The driver is the only process that logs, so one plain run is enough."""

from __future__ import annotations

import copy
import logging
import os
import secrets
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.observability.secrets import hide_secrets
from slime.utils.errors import ConfigError

__all__ = ["AXES", "WandbSink"]

logger = logging.getLogger(__name__)

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
    """One run; the step of a record is a metric of its own, because the axes advance independently."""

    def __init__(self, args: Namespace) -> None:
        wandb = _library()
        mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        try:
            self._run = _start(wandb, args, mode)
        except Exception as error:
            if mode != "online":
                raise
            logger.warning("W&B cannot be reached, the run is logged offline (wandb sync sends it later): %s", error)
            self._run = _start(wandb, args, "offline")
        for axis in sorted(set(AXES.values())):
            self._run.define_metric(axis)
        for glob, axis in AXES.items():
            self._run.define_metric(glob, step_metric=axis)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
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
