"""Flags of logging and tracking. Read by ``slime.observability.tracking`` and ``rollout_metrics``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slime.observability.sinks import TRACKERS
from slime.utils.misc import flag


@dataclass(frozen=True)
class OutputArgs:
    """Outputs and metrics."""

    output_dir: str = flag("outputs", "Parent of the run's folder, which holds metrics.jsonl and event files.")
    experiment_name: str | None = flag(
        None, "Name of the run's folder, which one live run can have; default: time of the start and process."
    )
    record_samples: int = flag(
        64,
        "Samples of each rollout that are kept in <run>/samples for slime board, slime replay and slime "
        "doctor mismatch; 0 keeps none.",
    )
    trackers: list[str] = field(
        default_factory=list,
        metadata={
            "choices": TRACKERS,
            "help": "Log to these trackers as well (pip install 'slime[NAME]'). Their environment variables name "
            "server, folder and key; --wandb-project is the project.",
        },
    )
    metrics_port: int | None = flag(
        None, "Serve the last value of every metric for Prometheus at this port of the driver, at /metrics."
    )
    metrics_host: str = flag("127.0.0.1", "Address of --metrics-port; 0.0.0.0 for all.")
    trace_endpoint: str | None = flag(
        None,
        "Send the spans of samples to this OpenTelemetry collector, http://HOST:4318 (OTLP over HTTP), and "
        "a traceparent header to the engines.",
        metavar="URL",
    )
    trace_share: float = flag(1.0, "Share of the samples with --trace-endpoint.")
    log_metric_lines: bool = flag(
        False,
        "Show the metrics of run.log on the terminal: 'rollout 3: {...}', 'perf 3: ...', 'step 7: ...', 'eval 3: ...'.",
    )
    log_passrate: bool = flag(
        False, "Log pass@k (k = 1, 2, 4, ... samples per prompt) of rollouts and evaluation sets."
    )
    log_reward_category: str | None = flag(
        None, "Key of dict rewards: log which share of the samples has each of its values."
    )
    log_multi_turn: bool = flag(False, "Log the number of turns and their lengths as multi_turn/...")
    log_correct_samples: bool = flag(
        False,
        "Log lengths of the samples with reward 1, and their entropy if the trainer computes it "
        "(--use-rollout-entropy).",
    )
    custom_rollout_log_function_path: str | None = flag(
        None, "Function that logs a rollout; when its result is true, our metrics are left out."
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "Function that logs an evaluation; when its result is true, our metrics are left out."
    )


@dataclass(frozen=True)
class ProfileArgs:
    """Profiles of the trainer."""

    use_pytorch_profiler: bool = flag(False, "Profile the trainer's ranks with torch's profiler (--profile-target).")
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = field(
        default_factory=lambda: ["train_overall"],
        metadata={
            "help": "Content of a profile: whole rollouts, the optimizer steps, or the passes for log-probs and "
            "advantages."
        },
    )
    profile_step_start: int = flag(10, "First rollout of the process that is profiled.")
    profile_step_end: int = flag(12, "First one that is not profiled any more.")
    tensorboard_dir: str | None = flag(None, "Directory of the traces; default <run>/profile.", metavar="DIR")
    record_memory_history: bool = flag(False, "Record the trainer's memory (--memory-recorder).")
    memory_snapshot_path: str = flag("snapshot.pickle", "End of the name of a snapshot's file.", metavar="NAME")
    memory_snapshot_dir: str = flag(".", "Where snapshots of the memory go.", metavar="DIR")
    memory_snapshot_num_steps: int | None = flag(None, "Rollouts until a snapshot is written and the recording ends.")
    memory_recorder: Literal["torch", "memray"] = flag(
        "torch", "torch: history of the device's allocator; memray: all of the process (needs memray)."
    )


@dataclass(frozen=True)
class TensorboardArgs:
    """TensorBoard."""

    use_tensorboard: bool = flag(
        False,
        "Write events to tensorboard_log/<project>/<experiment> instead of the run's folder. "
        "The environment variable TENSORBOARD_DIR names another folder.",
    )
    tb_project_name: str | None = flag(None, "Project in that path; default slime.")
    tb_experiment_name: str | None = flag(None, "Experiment in that path; default --experiment-name, else the time.")


@dataclass(frozen=True)
class WandbArgs:
    """Weights & Biases."""

    use_wandb: bool = flag(False, "Log to Weights & Biases (pip install slime[wandb]).")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, "Beats the environment variable WANDB_MODE."
    )
    wandb_dir: str | None = flag(None, "Local folder of its run files.")
    wandb_key: str | None = flag(None, "API key to log in with.")
    wandb_host: str | None = flag(None, "Address of the server.")
    wandb_team: str | None = flag(None, "Entity that owns the run.")
    wandb_group: str | None = flag(None, "Group; the run's name begins with it.")
    wandb_project: str | None = flag(None, "Project; default slime.")
    wandb_random_suffix: bool = flag(
        True, "Use the group as the run's name, without a suffix.", off="--disable-wandb-random-suffix"
    )
    wandb_run_id: str | None = flag(None, "Continue the run with this id.")
    wandb_always_use_train_step: bool = flag(
        False, "Count optimizer steps, not rollouts, on the axes of rollout and eval."
    )
