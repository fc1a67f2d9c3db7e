"""Flags of logging and tracking. Read by ``slime.observability.tracking`` and ``rollout_metrics``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["OutputArgs", "TensorboardArgs", "WandbArgs"]


@dataclass(frozen=True)
class OutputArgs:
    """Outputs and metrics."""

    output_dir: str = field(
        default="outputs", metadata={"help": "Parent of the run's folder, which holds metrics.jsonl and event files."}
    )
    experiment_name: str | None = field(
        default=None, metadata={"help": "Name of the run's folder; without it, the time of the start."}
    )
    log_passrate: bool = field(
        default=False, metadata={"help": "Log pass@k (k = 1, 2, 4, ... samples per prompt) of every evaluation set."}
    )
    log_reward_category: str | None = field(
        default=None, metadata={"help": "Key of dict rewards: log which share of the samples has each of its values."}
    )


@dataclass(frozen=True)
class TensorboardArgs:
    """TensorBoard."""

    use_tensorboard: bool = field(
        default=False,
        metadata={
            "help": "Write events to tensorboard_log/<project>/<experiment> instead of the run's folder. "
            "The environment variable TENSORBOARD_DIR names another folder."
        },
    )
    tb_project_name: str | None = field(default=None, metadata={"help": "Project in that path; default slime."})
    tb_experiment_name: str | None = field(
        default=None, metadata={"help": "Experiment in that path; default --experiment-name, else the time."}
    )


@dataclass(frozen=True)
class WandbArgs:
    """Weights & Biases."""

    use_wandb: bool = field(default=False, metadata={"help": "Log to Weights & Biases (pip install slime[wandb])."})
    wandb_mode: Literal["online", "offline", "disabled"] | None = field(
        default=None, metadata={"help": "Beats the environment variable WANDB_MODE."}
    )
    wandb_dir: str | None = field(default=None, metadata={"help": "Local folder of its run files."})
    wandb_key: str | None = field(default=None, metadata={"help": "API key to log in with."})
    wandb_host: str | None = field(default=None, metadata={"help": "Address of the server."})
    wandb_team: str | None = field(default=None, metadata={"help": "Entity that owns the run."})
    wandb_group: str | None = field(default=None, metadata={"help": "Group; the run's name begins with it."})
    wandb_project: str | None = field(default=None, metadata={"help": "Project; default slime."})
    wandb_random_suffix: bool = field(
        default=True,
        metadata={"off": "--disable-wandb-random-suffix", "help": "Use the group as the run's name, without a suffix."},
    )
    wandb_run_id: str | None = field(default=None, metadata={"help": "Continue the run with this id."})
    wandb_always_use_train_step: bool = field(
        default=False, metadata={"help": "Count optimizer steps, not rollouts, on the axes of rollout and eval."}
    )
