"""The tracker: passes every record of metrics to its sinks.

    sink          written                                       where
    jsonl         always                                        <output-dir>/<experiment>/metrics.jsonl
    tensorboard   unless --use-wandb is the only choice         the run's folder; tensorboard_log/<project>/<experiment>
                                                                with --use-tensorboard; TENSORBOARD_DIR beats both
    log           always                                        run.log; the terminal with --log-metric-lines
    wandb         --use-wandb                                   its own folder or server
    prometheus    --metrics-port                                http://<driver>:<port>/metrics
    others        --trackers mlflow swanlab trackio             their own folders or servers

The driver owns the only tracker of a run. A sink gets names, numbers and steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from slime.data.values import Array
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.run_info import plain_settings, write_run_info
from slime.observability.sinks import RUN_IDS, TRACKERS, JsonlSink, LogSink, PrometheusSink, TensorboardSink, WandbSink
from slime.utils.errors import ConfigError, reported, translated
from slime.utils.files import RunLock

logger = logging.getLogger(__name__)

# Axes that --wandb-always-use-train-step changes.
_ROLLOUT_AXES = ("rollout/step", "eval/step")


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        """Write one record. ``metrics`` does not hold ``step_key``."""

    def close(self) -> None:
        """Flush and close. Called once."""


class Tracker:
    """Passes each record to every sink.

    Args:
        sinks: destinations of the records.
        rollout_step: maps a rollout's number to its place on the rollout and eval axes.
        directory: the run's folder, for messages.
        lock: of that folder, released by :meth:`close`.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        rollout_step: Callable[[int], int] | None = None,
        directory: Path | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.directory = directory
        self._lock = lock
        self._sinks = list(sinks)
        self._rollout_step = rollout_step
        self._failing: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        """Write ``metrics``. ``metrics[step_key]`` is the step and is not a metric itself."""
        step = int(metrics[step_key])
        if self._rollout_step is not None and step_key in _ROLLOUT_AXES:
            step = self._rollout_step(step)
        values = {name: _plain(value) for name, value in metrics.items() if name != step_key}
        for sink in self._sinks:
            with reported(partial(self._complain, sink)):  # such as an unreachable server or a full disk
                sink.log(values, step_key, step)

    def _complain(self, sink: Sink, error: Exception) -> None:
        kind = type(sink).__name__
        # Once per kind: a full disk would fill the log.
        if kind not in self._failing:
            self._failing.add(kind)
            logger.warning(
                "%s could not write metrics; the run goes on, further failures are not shown: %s", kind, error
            )

    def close(self) -> None:
        """Close every sink, even if closing one of them fails. A second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            kind = type(sink).__name__
            with reported(lambda _, kind=kind: logger.exception("closing %s failed", kind)):  # type: ignore[misc]
                sink.close()
        if self._lock is not None:
            self._lock.close()


def create_tracker(args: Namespace, *, is_new: bool = False) -> Tracker:
    """The tracker that ``args`` describes. Its folders exist when this returns.

    Args:
        is_new: the run starts at its first rollout. If its folder has files of an earlier run, they move to a folder
            ``earlier_<time>`` below it, because curves and samples of two runs in one file cannot be told apart.

    Raises:
        ConfigError: the run's folder cannot be written, or another live run has it.
    """
    # Decided once: two clocks would put one run into two folders.
    started = time.strftime("%Y%m%d_%H%M%S")
    directory = run_directory(args, started)
    sinks: list[Sink] = []
    with contextlib.ExitStack() as opened:  # closed again if something cannot be

        def add(sink: Sink) -> None:
            sinks.append(opened.enter_context(contextlib.closing(sink)))

        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Before any file is opened: another live run may write to this folder.
            lock = opened.enter_context(contextlib.closing(_lock(directory)))
            if is_new and directory not in _started:
                _set_aside(directory, started, [value for value in vars(args).values() if isinstance(value, str)])
            _started.add(directory)
            add(JsonlSink(directory / "metrics.jsonl"))
            write_run_info(directory, vars(args))
        except OSError as error:
            raise ConfigError(
                f"--output-dir {args.output_dir}: cannot write to {directory}: {error.strerror or error}. "
                "Name a folder that can be written."
            ) from None
        events = event_directory(args, started)
        if events is not None:
            add(TensorboardSink(events))
            logger.info("metrics: %s; curves: tensorboard --logdir %s", directory / "metrics.jsonl", events)
        add(LogSink(is_shown=args.log_metric_lines))
        if args.use_wandb:
            add(WandbSink(args))
        if args.metrics_port is not None:
            add(PrometheusSink(args.metrics_host, args.metrics_port, directory))
        for name in dict.fromkeys(args.trackers):
            with translated(partial(_not_started, name)):  # such as a server that is away, a key that is refused
                add(TRACKERS[name](args.wandb_project or "slime", plain_settings(vars(args)), directory))
        # Everything is open. From here on the tracker closes it.
        opened.pop_all()
    return Tracker(
        sinks, rollout_step=lambda rollout_id: compute_rollout_step(args, rollout_id), directory=directory, lock=lock
    )


_FILES = (
    *("metrics.jsonl", "events.out.tfevents.*", "run.json", "progress.json", "ledger.jsonl", "run.log", RUN_IDS),
    *("schedule.jsonl", "weights.jsonl"),
    *("samples", "engines/*"),
)
"""The files of a run in its folder, as patterns."""
_BEFORE_THE_FOLDER = "fork_server.log"  # this run writes it already: SGLang is imported before everything else
_started: set[Path] = set()
"""Folders of this process: a run that restarts in the same job continues its files."""


def _set_aside(directory: Path, started: str, named: Sequence[str]) -> None:
    """Move the files of an earlier run, except those that this run reads or writes by a flag (``named``)."""
    found = [path for pattern in _FILES for path in directory.glob(pattern) if path.name != _BEFORE_THE_FOLDER]
    found = [path for path in found if not any(f"{value}/".startswith(f"{path}/") for value in named)]
    if not found:
        return
    earlier = directory / f"earlier_{started}"
    earlier.mkdir()
    for path in found:
        target = earlier / path.relative_to(directory)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    logger.warning("%s has files of an earlier run: moved to %s", directory, earlier)


def _lock(directory: Path) -> RunLock:
    return RunLock(
        directory, f"--experiment-name {directory.name}", "Give this run another name, or another --output-dir"
    )


def _not_started(name: str, error: BaseException) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError(
        f"--trackers {name}: the tracker could not start: {error}. Correct its environment variables "
        "(docs/observability.md names them), or drop the flag."
    )


def run_directory(args: Namespace, started: str = "run") -> Path:
    """``<output-dir>/<experiment>``. ``started`` is the experiment of a run that has no name yet."""
    return Path(args.output_dir) / (args.experiment_name or args.tb_experiment_name or started)


def event_directory(args: Namespace, started: str) -> Path | None:
    """The folder of TensorBoard events. None without events."""
    override = os.environ.get("TENSORBOARD_DIR")
    if args.use_tensorboard:
        experiment = args.tb_experiment_name or args.experiment_name or started
        default = Path("tensorboard_log") / (args.tb_project_name or "slime") / experiment
    elif args.use_wandb:
        return None
    else:
        default = run_directory(args, started)
    return Path(override) if override else default


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch become Python's. Other values stay."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, Array):
        # an array in a user's metrics is not a number, but must not end the run
        return value.item() if math.prod(value.shape) == 1 else str(value)
    return float(value) if isinstance(value, numbers.Real) else value
