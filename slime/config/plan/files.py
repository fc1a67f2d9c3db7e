"""What a run writes, where, when, and how much."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.config.plan.memory import precision_of
from slime.config.plan.shape import Shape
from slime.config.plan.values import read

__all__ = ["Output", "plan_files"]

_ADAM_IN_CHECKPOINT = 12  # fp32 main weight and two fp32 moments


@dataclass(frozen=True)
class Output:
    """One thing that is written; ``bytes`` of one writing, None where it depends on the data."""

    what: str
    where: str
    when: str
    bytes: int | None = None


def plan_files(args: Namespace, shape: Shape | None) -> list[Output]:
    """Everything that ends on disk."""
    return [*_metrics(args), *_checkpoints(args, shape), *_debug(args)]


def _metrics(args: Namespace) -> Iterator[Output]:
    run = Path(str(read(args, "output_dir"))) / str(read(args, "experiment_name"))
    yield Output("metrics", str(run / "metrics.jsonl"), "all along")
    if read(args, "use_tensorboard") or not read(args, "use_wandb"):
        yield Output("TensorBoard events", os.environ.get("TENSORBOARD_DIR") or _events(args, run), "all along")
    if read(args, "use_wandb"):
        yield Output("W&B run", str(read(args, "wandb_dir") or "wandb/"), "all along")
    if read(args, "record_samples"):
        yield Output("samples for the board", str(run / "samples"), "every rollout")
    if read(args, "use_pytorch_profiler"):
        yield Output("profiles", str(read(args, "tensorboard_dir") or run / "profile"), "from --profile-step-start")


def _events(args: Namespace, run: Path) -> str:
    if not read(args, "use_tensorboard"):
        return str(run)
    experiment = str(read(args, "tb_experiment_name") or read(args, "experiment_name"))
    return str(Path("tensorboard_log") / (read(args, "tb_project_name") or "slime") / experiment)


def _checkpoints(args: Namespace, shape: Shape | None) -> Iterator[Output]:
    interval = read(args, "save_interval")
    when = "at the end" if interval is None else f"every {interval} rollouts, and last"
    if read(args, "save"):
        yield Output("checkpoint", args.save, when, _checkpoint_bytes(args, shape))
    if read(args, "save_hf"):
        size = shape.num_parameters * precision_of(args).weights if shape else None
        yield Output("Hugging Face checkpoint", args.save_hf, when, size)
    if read(args, "update_weight_transport") == "disk":
        size = shape.num_parameters * precision_of(args).weights if shape else None
        yield Output("weights for the engines", str(read(args, "update_weight_disk_dir")), "every weight sync", size)


def _checkpoint_bytes(args: Namespace, shape: Shape | None) -> int | None:
    if shape is None:
        return None
    precision = precision_of(args)
    states = 0 if read(args, "no_save_optim") else min(precision.states, _ADAM_IN_CHECKPOINT)
    return shape.num_parameters * (precision.weights + states)


def _debug(args: Namespace) -> Iterator[Output]:
    for name, what in (
        ("save_debug_rollout_data", "samples of each rollout"),
        ("save_debug_train_data", "training data of each rollout"),
    ):
        if read(args, name):
            yield Output(what, str(read(args, name)), "every rollout")
    if read(args, "memory_snapshot_num_steps"):
        yield Output("memory snapshots", str(read(args, "memory_snapshot_dir")), "first steps")
