"""Files that a run writes: path, time and size."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.config.plan.layout import read
from slime.config.plan.memory import num_trainable, precision_of
from slime.config.resolve.paths import PATH_FLAGS
from slime.models.cost import num_parameters
from slime.models.shape import ModelShape

_ADAM_IN_CHECKPOINT = 12  # fp32 main weight and two fp32 moments


@dataclass(frozen=True)
class Output:
    """One output. ``bytes`` of one writing, None if it depends on the data."""

    what: str
    where: str
    when: str
    bytes: int | None = None


def plan_files(args: Namespace, shape: ModelShape | None) -> list[Output]:
    """Everything that ends on disk."""
    return [*_metrics(args), *_written(args, shape), *_snapshots(args)]


def _metrics(args: Namespace) -> Iterator[Output]:
    run = Path(str(read(args, "output_dir"))) / str(read(args, "experiment_name"))
    yield Output("metrics", str(run / "metrics.jsonl"), "during the run")
    if read(args, "use_tensorboard") or not read(args, "use_wandb"):
        yield Output("TensorBoard events", os.environ.get("TENSORBOARD_DIR") or _events(args, run), "during the run")
    if read(args, "use_wandb"):
        yield Output("W&B run", str(read(args, "wandb_dir") or "wandb/"), "during the run")
    for name in read(args, "trackers") or ():
        yield Output(f"{name} run", "its own folder or server", "during the run")
    if read(args, "record_samples"):
        yield Output("samples for the board", str(run / "samples"), "every rollout")
    if read(args, "use_pytorch_profiler"):
        yield Output("profiles", str(read(args, "tensorboard_dir") or run / "profile"), "from --profile-step-start")


def _events(args: Namespace, run: Path) -> str:
    if not read(args, "use_tensorboard"):
        return str(run)
    experiment = str(read(args, "tb_experiment_name") or read(args, "experiment_name"))
    return str(Path("tensorboard_log") / (read(args, "tb_project_name") or "slime") / experiment)


def _written(args: Namespace, shape: ModelShape | None) -> Iterator[Output]:
    interval = read(args, "save_interval")
    when = "at the end" if interval is None else f"every {interval} rollouts, and last"
    is_disk = read(args, "update_weight_transport") == "disk"
    size, sent = _exported_bytes(args, shape)
    sizes = {"save": (_checkpoint_bytes(args, shape), when), "save_hf": (size, when)}
    if is_disk:
        sizes |= dict.fromkeys(
            ("update_weight_disk_dir", "update_weight_local_checkpoint_dir"), (sent, "every weight sync")
        )
    sizes |= dict.fromkeys(("save_debug_rollout_data", "save_debug_train_data"), (None, "every rollout"))
    for flag in PATH_FLAGS:
        if flag.name in sizes and read(args, flag.name):
            num_bytes, when = sizes[flag.name]
            yield Output(flag.what, str(read(args, flag.name)), when, num_bytes)


def _exported_bytes(args: Namespace, shape: ModelShape | None) -> tuple[int, int] | tuple[None, None]:
    """Bytes of ``--save-hf``, and of a weight sync by files."""
    if shape is None:
        return None, None
    width = precision_of(args).weights
    numbers = 0 if read(args, "lora_merge") else num_trainable(args, shape)
    if not numbers:
        return (num_parameters(shape) * width,) * 2
    # FSDP trains adapters in fp32.
    return numbers * (4 if read(args, "train_backend") == "fsdp" else width), numbers * width


def _checkpoint_bytes(args: Namespace, shape: ModelShape | None) -> int | None:
    if shape is None:
        return None
    precision = precision_of(args)
    states = 0 if read(args, "no_save_optim") else min(precision.states, _ADAM_IN_CHECKPOINT)
    return (num_trainable(args, shape) or num_parameters(shape)) * (precision.weights + states)


def _snapshots(args: Namespace) -> Iterator[Output]:
    if read(args, "memory_snapshot_num_steps"):
        yield Output("memory snapshots", str(read(args, "memory_snapshot_dir")), "first steps")
