"""The destinations of metrics: ``metrics.jsonl``, the log, TensorBoard, Weights & Biases, and :data:`TRACKERS`."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import math
import os
import re
import secrets
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slime.config.roles import critic_args, role_args
from slime.data.ledger import LineFile
from slime.observability.metric_table import describe
from slime.observability.run_info import hide_secrets
from slime.observability.terminal import SHOWN_LINES
from slime.utils.errors import ConfigError, kept
from slime.utils.files import replacing


class JsonlSink:
    """Appends ``{"time": seconds, "step_key": "train/step", "train/step": 3, "train/loss": 0.1, ...}`` per record.

    For scripts and notebooks: needs no library. NaN and infinities, which JSON lacks, become null. A resumed run of the
    same name appends to the same file. Readable during the run, complete if the run is killed.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        record = {"time": round(time.time(), 3), "step_key": step_key, step_key: step}
        record |= {name: _json(value) for name, value in metrics.items()}
        self._file.append(record)

    def close(self) -> None:
        self._file.close()


def _json(value: Any) -> Any:
    if isinstance(value, float):
        # JSON lacks NaN and infinities.
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str) or value is None else str(value)


logger = logging.getLogger(__name__)

_CRITIC = "train/critic-"


class LogSink:
    """Lines of the log, for scripts that grep them: ``rollout 3: {...}``, ``perf 3: {...}``, ``step 7: {...}``.

    One line per record and kind. Names keep their prefix.

    Args:
        is_shown: whether the terminal shows the lines, too (``run_log``).
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._lines = logging.getLogger(SHOWN_LINES) if is_shown else logger

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        kinds: dict[str, dict[str, Any]] = {}
        for name, value in metrics.items():
            kinds.setdefault(_kind(name), {})[name] = value
        for kind, values in kinds.items():
            self._lines.info("%s %d: %s", kind, step, values)

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
        wandb = _library("wandb", "--use-wandb")
        mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        run_id = args.wandb_run_id or secrets.token_hex(4)
        group = args.wandb_group or args.experiment_name or "run"
        name = group
        if args.wandb_random_suffix:
            group = f"{group}_{run_id}"
            name = f"{group}-RANK_{args.rank}"
        # With --megatron-config-path the roles have other values than the command line.
        known = args if vars(args).get("megatron_config_path") is None else role_args(args, "actor")
        critic = vars(critic_args(args)) if vars(args).get("use_critic") else {}
        settings = vars(known) | {f"critic/{setting}": value for setting, value in critic.items()}
        config: dict[str, Any] = hide_secrets(copy.deepcopy(settings))
        if "SLURM_JOB_ID" in os.environ:
            config["env_vars"] = {"SLURM_JOB_ID": os.environ["SLURM_JOB_ID"]}
        options = {
            "id": run_id,
            "dir": args.wandb_dir,
            "entity": args.wandb_team,
            "project": args.wandb_project or "slime",
            "group": group,
            "name": name,
            "config": config,
            "resume": "allow",
        }
        errors: list[Exception] = []
        with kept(errors):
            if mode == "online" and args.wandb_key:
                wandb.login(key=args.wandb_key, host=args.wandb_host)
            self._run = wandb.init(mode=mode, **options)
        if errors and mode != "online":  # offline runs need no server: the error is in the settings
            raise errors[0]
        if errors:
            text = "W&B cannot be reached, the run is logged offline (wandb sync sends it later): %s"
            logger.warning(text, errors[0])
            self._run = wandb.init(mode="offline", **options)
        for axis in sorted(set(AXES.values())):
            self._run.define_metric(axis)
        for glob, axis in AXES.items():
            self._run.define_metric(glob, step_metric=axis)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        # The step is a metric too, because the axes advance independently.
        self._run.log({**metrics, step_key: step})

    def close(self) -> None:
        self._run.finish()


def _library(name: str, flag: str) -> Any:
    """The package ``name``, which is also the name of an extra."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{flag} needs the package {name}: pip install 'slime[{name}]', or drop the flag.") from None


RUN_IDS = "trackers.json"
"""File in the run's folder: tracker -> id of its run. A resumed run continues the runs of its trackers."""


def _known_id(directory: Path, name: str) -> str | None:
    file = directory / RUN_IDS
    return json.loads(file.read_text(encoding="utf-8")).get(name) if file.is_file() else None


def _remember_id(directory: Path, name: str, run_id: str) -> None:
    file = directory / RUN_IDS
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    with replacing(file) as partial:
        partial.write_text(json.dumps(known | {name: run_id}, indent=1), encoding="utf-8")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


class MlflowSink:
    """A run of MLflow. ``MLFLOW_TRACKING_URI`` names the server, default ``<output-dir>/mlflow.db``.

    A thread of the library sends the records, because requests to a server that is away are repeated for minutes.
    """

    # Other characters in a name are an error of the whole record.
    _INVALID = re.compile(r"[^\w./ :-]")
    _PARAMS_AT_ONCE, _LONGEST_PARAM = 100, 6000
    _MOST_PENDING = 100

    def __init__(self, project: str, settings: Mapping[str, Any], directory: Path) -> None:
        mlflow = _library("mlflow", "--trackers mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.parent.absolute() / 'mlflow.db'}"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # with its 7 a run would end minutes late
        self._client = mlflow.MlflowClient(uri)
        self._metric = mlflow.entities.Metric
        self._pending: deque[Any] = deque()
        run_id = _known_id(directory, "mlflow")
        if run_id is None:
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
            experiment = self._client.get_experiment_by_name(project)
            experiment_id = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
            run_id = str(self._client.create_run(experiment_id, run_name=directory.name).info.run_id)
            _remember_id(directory, "mlflow", run_id)
            texts = [(name, str(value)[: self._LONGEST_PARAM]) for name, value in settings.items()]
            params = [mlflow.entities.Param(*text) for text in texts]
            for i in range(0, len(params), self._PARAMS_AT_ONCE):
                self._client.log_batch(run_id, params=params[i : i + self._PARAMS_AT_ONCE])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        now = int(time.time() * 1000)
        values = [
            self._metric(self._INVALID.sub("_", name), float(value), now, step)
            for name, value in _numbers(metrics).items()
        ]
        self._pending.append(self._client.log_batch(self._run_id, metrics=values, synchronous=False))
        if len(self._pending) > self._MOST_PENDING:
            self._pending.popleft().wait()

    def close(self) -> None:
        while self._pending:
            self._pending.popleft().wait()
        self._client.set_terminated(self._run_id)


class SwanlabSink:
    """A run of SwanLab. ``SWANLAB_MODE`` (online, offline, local, disabled) and ``SWANLAB_API_KEY`` configure it."""

    def __init__(self, project: str, settings: Mapping[str, Any], directory: Path) -> None:
        swanlab = _library("swanlab", "--trackers swanlab")
        run_id = _known_id(directory, "swanlab")
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME") or project,
            name=directory.name,
            id=run_id,
            resume=None if run_id is None else "allow",
            config=settings,
            # By default it asks for a key, replaces sys.stdout, and stores the command line with its keys.
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}, probe={"runtime": False}),
        )
        if run_id is None:
            _remember_id(directory, "swanlab", self._run.id)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A run of Trackio. ``TRACKIO_DIR`` and ``TRACKIO_SPACE_ID`` configure it."""

    def __init__(self, project: str, settings: Mapping[str, Any], directory: Path) -> None:
        trackio = _library("trackio", "--trackers trackio")
        known = _known_id(directory, "trackio")
        self._run = trackio.init(
            project=project,
            name=known or directory.name,
            config=settings,
            resume="never" if known is None else "must",
            embed=False,
        )
        _remember_id(directory, "trackio", self._run.name)

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        # Its charts have one x axis. The step is a metric too, because the axes advance independently.
        self._run.log({**_numbers(metrics), step_key: step}, step=step)

    def close(self) -> None:
        self._run.finish()


class PrometheusSink:
    """``/metrics`` of the driver (``--metrics-port``): the last value of every metric.

    ``train/loss`` is ``slime_train_loss{run="<experiment>"}``: every character but letters and digits becomes ``_``.
    """

    def __init__(self, host: str, port: int, directory: Path) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = directory.name
        self._last: dict[str, tuple[str, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--metrics-port {port} --metrics-host {host}: cannot listen there: {error}. "
                "Choose a free port; 0 lets the system choose."
            ) from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        logger.info("metrics for Prometheus: %s", self.url)

    def collect(self) -> Iterator[Any]:
        """One gauge per metric. Called by the server, in its thread."""
        from prometheus_client.core import GaugeMetricFamily

        for name, (metric, value) in sorted(dict(self._last).items()):
            entry = describe(metric)
            unit = f" ({entry.unit})" if entry is not None and entry.unit else ""
            gauge = GaugeMetricFamily(
                name, metric if entry is None else f"{metric}: {entry.meaning}{unit}", labels=["run"]
            )
            gauge.add_metric([self._run], value)
            yield gauge

    def log(self, metrics: Mapping[str, Any], step_key: str, step: int) -> None:
        values = _numbers(metrics) | {step_key: step, "last_record_timestamp_seconds": time.time()}
        named = {name: ("slime_" + re.sub(r"[^a-zA-Z0-9]", "_", name), value) for name, value in values.items()}
        self._last |= {prometheus: (name, float(value)) for name, (prometheus, value) in named.items()}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


TRACKERS: dict[str, Callable[[str, Mapping[str, Any], Path], Any]] = {
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
    "trackio": TrackioSink,
}
"""Name in ``--trackers`` -> its sink, made of project, plain arguments and the run's folder."""
