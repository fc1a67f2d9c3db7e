"""The Ray cluster of a run: an existing one, or one that the driver starts and stops (embedded).

Without a GPU, the "GPU" slots of Ray are logical: the embedded cluster announces as many as the run needs, so placement
is the same code on a laptop and on a cluster. In an embedded cluster all services of slime (engines, routers, process
groups) use loopback. The services of Ray use the host's address and ask for a token.

The output of actors goes to ``run.log`` and the terminal:

    embedded cluster   the files of the session, all on this host: read until the cluster has ended, so nothing is lost
    existing cluster   Ray's log monitors send the lines of all nodes to the driver. Lines of the last second may be
                       missing, but are in the session folder of their node
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray._private import parameter, services, utils
from ray._private.ray_logging import global_worker_stdstream_dispatcher as ray_lines

from slime.config.plan.memory import LARGEST_ROUNDED
from slime.observability.console import START
from slime.observability.logging_utils import RUN_LOG
from slime.observability.terminal import TERMINAL
from slime.ray.engines.preloading import (
    FORK_SERVER_LOG,
    NCCL,
    VISIBLE_DEVICES,
    engine_log_directory,
    forks_env,
    preloading,
    worker_variables,
)
from slime.ray.run import worker_launcher
from slime.utils import accelerator
from slime.utils.async_utils import Deadline
from slime.utils.errors import ConfigError, StartFailed, kept
from slime.utils.files import scratch_folder
from slime.utils.process import has_ended
from slime.utils.reaper import reap, start_reaper, with_their_children

# Makes Ray leave all devices visible: slime picks the device of each process from its slot.
NOSET_VISIBLE_DEVICES = {
    f"RAY_EXPERIMENTAL_NOSET_{vendor}_VISIBLE_DEVICES": "1"
    for vendor in ("CUDA", "HIP", "ROCR", "ASCEND_RT", "HABANA", "NEURON_RT", "TPU", "ONEAPI", "MUSA")
}
NOSET_VISIBLE_DEVICES_ENV_VARS_LIST = list(NOSET_VISIBLE_DEVICES)

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 512 * 1024**2
_EMBEDDED = "slime_embedded"  # a resource that marks clusters started by running_cluster()
_DEVICE_TYPE = "accelerator_type:"
_ROOM_TO_JOIN = 8  # logical devices for engines that join. On a GPU machine Ray has all devices
_DRIVER_CPUS = 4  # data buffer, rollout manager and their children
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PINNED_SIZE = "pinned_max_cached_size_mb"
# Limits of Ray for its own start and for the start of a worker. Its defaults, 30 and 60 seconds, are too short for a
# busy machine.
_RAYS_PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
}
_NODE_TIMEOUT_S = 600.0
_NODE = "raylet"
_LOOK_EVERY_S = 0.1
_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"


@contextmanager
def running_cluster(args: Namespace) -> Iterator[None]:
    """Connect to Ray, or start it, for the block. An embedded cluster always stops at its end.

    Lines of the actors go to ``run.log``. Temporary files of an embedded cluster and its processes are in one folder,
    which is deleted after the block.
    """
    RUN_LOG.shows_prints = args.debug_rollout_only
    if ray.is_initialized():
        with received():
            yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # prestarted workers would have another environment
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of peers that fail after a death
    # Ray's default is 15: beside other busy processes of the machine, actors would hardly run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    logging.getLogger(_TOKEN_LOGGER).setLevel(logging.ERROR)  # Ray warns at every start that it asks for a token
    START.begin("Ray")
    with ExitStack() as started:
        with START.shown():
            folder = started.enter_context(scratch_folder())
            if os.environ.get("RAY_ADDRESS"):
                ray.init(log_to_driver=True, logging_level=logging.WARNING)
                started.callback(ray.shutdown)
                started.enter_context(received())
                check_devices(ray.cluster_resources())
            else:
                # Ray keeps a record of each call of an actor, 60 MB for 1,000 rollouts. Only its own tools show them.
                os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
                for name, value in _RAYS_PATIENCE.items():
                    os.environ.setdefault(name, value)
                start_reaper(folder)  # before Ray starts: ends the remaining processes if this one is killed
                slots = slot_layout(args)
                if accelerator.current().is_cpu:
                    trainer = None if args.debug_rollout_only else f"slime.backends.{args.train_backend}_utils.actor"
                    log, has_engines = engine_log_directory(args) / FORK_SERVER_LOG, slots.engines > 0
                    started.enter_context(preloading(log, forks_env(), trainer=trainer, has_engines=has_engines))
                started.enter_context(followed(folder / "ray" / "session_latest" / "logs"))
                started.callback(ray.shutdown)
                room = 0 if args.engines_port is None else _ROOM_TO_JOIN
                _start_embedded(slots.total + room, folder / "ray")
        START.end("Ray")
        yield


def check_devices(resources: Mapping[str, float]) -> None:
    """Refuse to treat a cluster with GPUs as CPUs because the driver's machine has no GPU.

    Args:
        resources: of the cluster. Ray adds the device type of each node.

    Raises:
        ConfigError: ``SLIME_ACCELERATOR`` does not confirm it.
    """
    types = [name for name in resources if name.startswith(_DEVICE_TYPE)]
    if types and accelerator.current().is_cpu and not os.environ.get("SLIME_ACCELERATOR"):
        raise ConfigError(
            f"this machine has no GPU that slime can use, and nodes of the Ray cluster have ({', '.join(types)}): set "
            "SLIME_ACCELERATOR=cuda to lead the run from here, or SLIME_ACCELERATOR=cpu to leave the GPUs alone."
        )


def _start_embedded(slots: int, directory: Path) -> None:
    """Start Ray as children of this process. Its limits for the start are short for a busy machine: two attempts.

    Raises:
        StartFailed: the second attempt failed as well.
    """
    mine = psutil.Process()
    before = set(mine.children())
    for is_last in (False, True):
        errors: list[Exception] = []
        with kept(errors):  # a bare Exception, errors of gRPC, timeouts
            return _init_embedded(slots, directory)
        ray.shutdown()
        # Not the new children of older ones: they are forks of the process that preloads.
        reap(with_their_children(set(mine.children()) - before), grace_s=0.0)
        reason = f"Ray did not start: {str(errors[0]).partition('. ')[0] or type(errors[0]).__name__}"
        if is_last:
            error, home = errors[0], os.path.expanduser("~")
            hint = "A machine without free processors or memory is the usual cause: end other programs and start again."
            if isinstance(error, OSError) and Path(error.filename or "/").is_relative_to(home):
                hint = f"Ray keeps a token in ~/.ray: set HOME ({home}) to a folder that can be written."
            raise StartFailed(f"{reason}. It was started twice. {hint}") from error
        logger.warning("%s. It is started once more.", reason)


def _init_embedded(slots: int, directory: Path) -> None:
    is_cpu = accelerator.current().is_cpu
    # Ray would refuse more logical slots than the variables name.
    with _without(VISIBLE_DEVICES if is_cpu else ()), _lean_node() if is_cpu else nullcontext():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, slots + _DRIVER_CPUS),
            num_gpus=slots if is_cpu else None,
            object_store_memory=_OBJECT_STORE_BYTES if is_cpu else None,
            include_dashboard=False,
            log_to_driver=False,  # run.log has the lines
            logging_level=logging.WARNING,
            resources={_EMBEDDED: 1},
            _temp_dir=str(directory),
        )


@contextmanager
def _lean_node() -> Iterator[None]:
    """Start Ray without its services that no run uses, inside the block. ``ray.init`` has no parameters for them.

    The monitor of the autoscaler, the log monitor (:class:`WorkerLogs` reads the files), the dashboard and its agent
    take over five seconds of processor time. Ray asks without a pause whether the node has registered, and gives up
    after 30 seconds: here it waits for longer, with pauses, but not for a node that has ended.
    """
    replaced = parameter.RayParams, services.start_api_server, services.get_node, services.start_ray_process
    dependency_error = utils.get_dashboard_dependency_error

    def registered_node(*words: Any) -> Any:
        deadline = Deadline(_NODE_TIMEOUT_S, "Ray's node to register")
        node = [process for process in psutil.Process().children() if process.name() == _NODE]
        while True:
            try:
                return replaced[2](*words)
            except RuntimeError:  # not yet
                if deadline.remaining <= 0 or (node and all(map(has_ended, node))):
                    raise
                time.sleep(_LOOK_EVERY_S)

    def with_idle_agent(words: list[str], *more: Any, **options: Any) -> Any:
        words = [word.replace(f"{services.RAY_PATH}/dashboard/agent.py", worker_launcher.__file__) for word in words]
        return replaced[3](words, *more, **options)

    is_forked = {"setup_worker_path": worker_launcher.__file__} if worker_launcher.WORKER_FORKS in os.environ else {}
    parameter.RayParams = partial(replaced[0], no_monitor=True, include_log_monitor=False, **is_forked)
    services.start_api_server = lambda *_, **__: ("", None)
    services.get_node, services.start_ray_process = registered_node, with_idle_agent
    utils.get_dashboard_dependency_error = lambda: None  # it imports them
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server, services.get_node, services.start_ray_process = replaced
        utils.get_dashboard_dependency_error = dependency_error


@contextmanager
def _without(names: Iterable[str]) -> Iterator[None]:
    """Unset these variables inside the block."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def node_address() -> str:
    """Address that this node's services bind to: ``SLIME_HOST_IP`` if set, loopback in an embedded cluster."""
    return os.environ.get("SLIME_HOST_IP") or ray.util.get_node_ip_address()


class SlotLayout(NamedTuple):
    """Numbers of device slots: of the whole run, the first one of the engines, of the trainer, of the engines."""

    total: int
    first_engine: int
    train: int
    engines: int


def slot_layout(args: Namespace) -> SlotLayout:
    """Trainer and engines side by side, or on the same slots with ``--colocate``. External engines have none."""
    train = 0 if args.debug_rollout_only else args.world_size
    engines = 0 if args.debug_train_only or args.rollout_external else args.rollout_num_gpus
    total, first = (max(train, engines), 0) if args.colocate else (train + engines, train)
    return SlotLayout(total, first, train, engines)


def worker_env() -> dict[str, str]:
    """Environment variables of every actor that slime starts."""
    return worker_variables(is_embedded())


def nccl_as_engines(engine_words: Sequence[str]) -> dict[str, str]:
    """Variables that engines override. The trainer must use the same values."""
    return dict.fromkeys(NCCL, "1") if "--enable-symm-mem" in engine_words else {}


def allocator_env(given: Mapping[str, Any]) -> dict[str, str]:
    """Settings of torch's allocators for trainer ranks: the user's, and pinned memory of the size that is asked for.

    By default torch rounds pinned blocks up to powers of two: 16 GiB for a buffer of 11 GB.
    ``pinned_max_cached_size_mb`` ends this for larger blocks, which return to the system when they are freed. The other
    setting that ends it, ``pinned_max_round_threshold_mb``, is unsafe alone: torch looks for a freed block by its power
    of two, and may hand out one that is smaller than the request (``get_free_block`` in ``CachingHostAllocator.h``).

    Args:
        given: --train-env-vars, which replace variables of the driver.
    """
    if accelerator.current().is_cpu or _torch_version() < (2, 13):  # an older torch refuses unknown settings
        return {}
    users = {name: str(given.get(name, os.environ.get(name, ""))) for name in _ALLOCATORS}
    # torch reads one of the variables for some settings and the other one for others.
    settings = {name: value for name, value in users.items() if value} or {_ALLOCATORS[0]: ""}
    return {name: _exact_pinned_sizes(value) for name, value in settings.items()}


def _exact_pinned_sizes(setting: str) -> str:
    if _PINNED_SIZE in setting:
        return setting
    threshold = re.search(r"pinned_max_round_threshold_mb:(\d+)", setting)
    largest = threshold.group(1) if threshold else LARGEST_ROUNDED // 1024**2
    return ",".join(filter(None, (setting, f"{_PINNED_SIZE}:{largest}")))


def _torch_version() -> tuple[int, ...]:
    """Major and minor number, without an import of torch."""
    return tuple(map(int, metadata.version("torch").split(".")[:2]))


def is_embedded() -> bool:
    """Whether this run has started the cluster, on this host alone. Any process of the run may ask."""
    # Not by the address of the cluster: Ray uses the host's address also for loopback.
    return _EMBEDDED in ray.cluster_resources()


_WORKER_LOGS = ("worker-*.out", "worker-*.err", "raylet.err", "gcs_server.err")
_PID = re.compile(r"-(\d+)\.(?:out|err)$")
_READ_EVERY_S = 0.2
_MOST_LOG_BYTES = 1 << 22  # of one file at once
_DRAIN_S = 1.0
_RAYS_HANDLER = "ray_print_logs"
_PROCESSES_OF_RAY = ("raylet", "gcs_server")
# Lines by which Ray marks the owner of the lines that follow.
_ACTOR = ":actor_name:"
_MARKS = (_ACTOR, ":task_name:", ":job_id:")


@dataclass
class _File:
    """A log up to ``position``. ``rest``: the begin of a line whose end is not written yet."""

    path: Path
    name: str
    position: int = 0
    rest: bytes = b""

    def new_lines(self, *, is_over: bool) -> list[str]:
        """The lines since the last call. ``is_over``: also the last one without a line end."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read(_MOST_LOG_BYTES)
        except OSError:  # deleted with its folder
            data = b""
        self.position += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if is_over and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        return [line.decode("utf-8", errors="replace") for line in lines]


class WorkerLogs:
    """Follows the logs of one folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, _File] = {}

    def look(self, *, is_over: bool = False) -> None:
        """Pass the new lines on."""
        for pattern in _WORKER_LOGS:
            for path in sorted(self._directory.glob(pattern)):
                file = self._files.setdefault(path, _File(path, path.stem))
                while lines := file.new_lines(is_over=is_over):
                    self._pass_on(file, lines)

    def _pass_on(self, file: _File, lines: list[str]) -> None:
        pid = _PID.search(file.path.name)
        for line in lines:
            if line.startswith(_ACTOR):
                file.name = line.removeprefix(_ACTOR).strip()
        texts = [line for line in lines if not line.startswith(_MARKS)]
        name = f"{file.name} {pid[1]}" if pid and not file.name.startswith("worker-") else file.name
        RUN_LOG.from_actor(name, texts, is_error=file.path.suffix == ".err")


@contextmanager
def followed(directory: Path) -> Iterator[None]:
    """Follow the logs of an embedded cluster inside the block, and to their ends after it."""
    logs, ended = WorkerLogs(directory), threading.Event()

    def follow() -> None:
        while not ended.wait(_READ_EVERY_S):
            logs.look()

    thread = threading.Thread(target=follow, name="slime-worker-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        logs.look(is_over=True)


@contextmanager
def received() -> Iterator[None]:
    """Take the lines that Ray sends to the driver inside the block, instead of Ray's own printing."""
    replaced = [pair for pair in ray_lines.handlers if pair[0] == _RAYS_HANDLER]
    ray_lines.remove_handler(_RAYS_HANDLER)
    ray_lines.add_handler("slime", _receive)
    try:
        yield
        time.sleep(_DRAIN_S)  # the monitors read the files a few times in a second
    finally:
        ray_lines.remove_handler("slime")
        for pair in replaced:
            ray_lines.add_handler(*pair)


def _receive(batch: dict[str, Any]) -> None:
    pid, lines = batch.get("pid"), batch["lines"]
    if pid == "autoscaler":  # the state of the cluster every few seconds. A run names the resource that it lacks
        return
    if pid in _PROCESSES_OF_RAY:  # a node that runs out of memory or disk, and the like
        RUN_LOG.write(f"[{pid}] {line}" for line in lines)
        for line in lines:
            TERMINAL.line(f"warning: {pid}: {line}", is_error=True)
        return
    name = batch.get("actor_name") or batch.get("task_name") or "worker"
    RUN_LOG.from_actor(f"{name} {pid} on {batch.get('ip')}", lines, is_error=batch["is_err"])
