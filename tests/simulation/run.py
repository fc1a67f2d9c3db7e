"""Runs the real driver in a simulated world, and checks the law of the ledger at its end.

Real: the driver's loop, the start and the restart of a run, the Data Buffer and its files, the rollout manager,
collection and requests, the replacement of engines, the trainer's actor, the weight sync, the files of checkpoints.
Simulated, in ``install``: clock, threads, Ray, HTTP, disk, engines, the trainer's model, the console.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import importlib
import logging
import random
import shutil
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray.exceptions import RayActorError

from slime.utils.errors import DeadlineExceeded
from tests.simulation import cluster, disk, engines, faults, network, threads, trainer
from tests.simulation.law import broken_laws, changed_samples
from tests.simulation.modes import FULLY_ASYNC, MODES, NUM_ROLLOUTS, arguments, parsed
from tests.simulation.world import World, world

_MAX_STARTS = 8


@dataclass(frozen=True)
class Result:
    """One simulated run.

    Attributes:
        problems: broken laws, or an error that no fault explains. Empty if all is well.
        digest: hash over all events.
        starts: attempts of the operator to run the command.
        errors: of the starts that failed.
    """

    seed: int
    problems: list[str]
    digest: str
    events: int
    seconds: float
    starts: int
    mode: str
    faults: list[faults.Fault] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- stand-ins


class _Slots:
    group = None
    visible_ids = ()

    def __init__(self, count: int) -> None:
        self.device_ids = list(range(count))

    def __len__(self) -> int:
        return len(self.device_ids)

    def strategy(self, slot: int) -> None:
        return None


def _slots(args: Namespace) -> dict[str, Any]:
    return {"actor": _Slots(args.world_size), "rollout": _Slots(args.rollout_num_gpus)}


def _reserve(count: int, timeout_s: float) -> _Slots:
    """Devices for an engine that joins, after up to a second, or never."""
    here = world()
    here.sleep(here.random.random())
    if here.chance(0.1):
        raise DeadlineExceeded("no node had the devices in time")
    return _Slots(count)


class _Quiet:
    """Accepts every call."""

    directory = None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: nullcontext()

    @property
    def terminal(self) -> _Quiet:
        return self


_QUIET = _Quiet()


class _Labels(_Quiet):
    """The tracker. It keeps which weights the driver names in its records of evaluations."""

    def log(self, metrics: dict[str, Any], step_key: str) -> None:
        if step_key == "eval/step":
            world().globals["labels"].append((metrics[step_key], metrics.get("eval/weight_version")))


class _Store:
    """Ray's internal store of process infos and heartbeats, which stop while a process is paused."""

    @classmethod
    def read(cls, key: str, namespace: str) -> bytes | None:
        actor_id, _, what = key.partition(".")
        process = world().processes[int(actor_id, 16)]
        if what:
            at = process.paused_at if process.is_paused else world().now
            return str(int(at)).encode()
        return cls._info(process.name, process.number, actor_id)

    @staticmethod
    @functools.lru_cache(maxsize=1000)
    def _info(name: str, number: int, actor_id: str) -> bytes:
        import dataclasses
        import json

        from slime.ray.watch.heartbeat import ProcessInfo

        info = ProcessInfo(name, number, "host", 0.0, "", "", actor_id, "node", 10.0)
        return json.dumps(dataclasses.asdict(info)).encode()


def _on_node_of(info: Any, function: Callable[..., Any]) -> Any:
    from slime.ray.watch.heartbeat import Usage

    process = world().processes[info.pid]
    if function.__name__ == "_kill":
        world().kill(process)
        return None
    if process.is_dead:
        return None
    return Usage("stopped" if process.is_paused else "running", world().now)


def _names() -> Iterator[tuple[str, str, Any]]:
    """(module, name, stand-in)."""
    nothing = lambda *args, **kwargs: None  # noqa: E731
    for module in ("data_buffer", "rollout", "train_actor", "engines.actor"):
        yield f"slime.ray.{module}", "register_process", nothing
        yield f"slime.ray.{module}", "configure_logger", nothing
    for module in ("data_buffer", "rollout", "actor_group", "engines.servers"):
        yield f"slime.ray.{module}", "worker_env", dict
    yield "slime.ray.actor_group", "allocator_env", lambda *args: {}
    yield "slime.ray.actor_group", "nccl_as_engines", lambda *args: {}
    yield "slime.ray.run.start", "create_placement_groups", _slots
    yield "slime.ray.run.start", "create_tracker", lambda *args, **kwargs: _Labels()
    yield "slime.ray.run.start", "START", _QUIET
    yield "slime.ray.run.start", "RUN_LOG", _QUIET
    yield "slime.ray.run.start", "Console", lambda *args: _QUIET
    yield "slime.ray.watch.heartbeat", "_internal_kv_get", _Store.read
    yield "slime.ray.watch.heartbeat", "_on_node_of", _on_node_of
    # a pid of another length would change the size of a file, which a power failure notes
    yield "slime.ray.watch.progress", "_process", lambda: {"pid": 1, "pid_since": 0.0}
    yield "slime.ray.watch.heartbeat", "_host", lambda: "elsewhere"
    yield "slime.ray.watch", "missing_for", nothing
    yield "slime.ray.journal", "_is_exact", lambda args: True
    yield "slime.ray.rollout", "FinishedSamples", lambda args: _QUIET
    yield "slime.ray.engines.servers", "RouterProcess", network.RouterProcess
    yield "slime.ray.run.start", "EnginePort", engines.EnginePort
    yield "slime.ray.run.restart", "copy", SimpleNamespace(deepcopy=cluster.copied)
    yield "slime.ray.engines.servers", "fork_server_of", nothing
    yield "slime.ray.engines.servers", "node_address", lambda: "host"
    for module in ("slot", "slots"):
        yield f"slime.ray.engines.{module}", "remove_worker", network.remove_worker
    yield "slime.ray.engines.slot", "registered_workers", network.registered_workers
    yield "slime.ray.train_actor", "trainer_class", lambda *args: trainer.SimulatedTrainer
    yield "slime.ray.weight_updater", "weight_updater", lambda args, rank, size: trainer.Updater(size)
    yield "slime.ray.train_actor", "node_address", lambda: "host"
    yield "slime.ray.train_actor", "claim_ports", lambda *args: SimpleNamespace(first=world().events)
    yield FULLY_ASYNC, "atexit", SimpleNamespace(register=nothing)
    yield "slime.utils.async_utils", "concurrent", threads.CONCURRENT
    yield "slime.utils.files", "os", disk.OS
    yield "slime.data.ledger", "os", disk.OS


def _counted(trained: Callable[..., None]) -> Callable[..., None]:
    """``DataBuffer.trained``, which also keeps the samples that the trainer used."""

    def note(self: Any, rollout_id: int) -> None:
        here = world()
        samples = [entry["samples"] for entry in here.globals["trained"] if entry["rollout"] == rollout_id]
        here.globals["counted"].append((rollout_id, samples))
        trained(self, rollout_id)

    return note


_MODULES = {"time": threads.TIME, "threading": threads.THREADING, "queue": threads.QUEUE, "random": threads.RANDOM}


@contextmanager
def installed() -> Iterator[None]:
    """Put the stand-ins into the modules of ``slime`` for the block."""
    import ray

    from slime.ray.data_buffer import DataBuffer
    from slime.ray.engines.actor import EngineActor
    from slime.ray.engines.health import HealthMonitor
    from slime.ray.engines.servers import RolloutServers
    from slime.rollout.engine_request import EngineRequest
    from slime.utils import http_utils

    for module in (
        "slime.ray.run.start",
        "slime.ray.run.main",
        "slime.ray.run.restart",
        "slime.rollout.sglang_rollout",
    ):
        importlib.import_module(module)
    for mode in MODES:
        parsed(mode)
    real = {id(importlib.import_module(name)): stand_in for name, stand_in in _MODULES.items()} | {id(ray): cluster.RAY}
    with ExitStack() as patches:

        def put(target: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(target, name, value))

        for name, module in list(sys.modules.items()):
            if name.startswith("slime."):
                for attribute, value in list(vars(module).items()):
                    if id(value) in real:
                        put(module, attribute, real[id(value)])
        for module_name, attribute, value in _names():
            put(importlib.import_module(module_name), attribute, value)
        put(RolloutServers, "_check_room", staticmethod(lambda number: None))
        put(RolloutServers, "_reserve_engine", staticmethod(_reserve))
        put(RolloutServers, "_release", staticmethod(lambda groups: None))
        put(http_utils, "_http_client", network.Client())
        put(DataBuffer, "trained", _counted(DataBuffer.trained))
        defaults = HealthMonitor.__init__.__kwdefaults__
        patches.enter_context(mock.patch.dict(defaults, clock=threads.TIME.monotonic))
        put(EngineRequest, "__hash__", lambda request: hash(tuple(request.payload["input_ids"])))
        patches.enter_context(mock.patch.dict(cluster.SUBSTITUTES, {EngineActor: engines.SimulatedEngine}))
        patches.enter_context(mock.patch.dict("os.environ"))
        patches.enter_context(disk.watched())
        policy = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(threads.LoopPolicy())
        patches.callback(asyncio.set_event_loop_policy, policy)
        patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        patches.callback(logging.disable, disabled)
        put(logging.Manager, "_clear_cache", lambda manager: None)  # of 1500 loggers, at each start of a trainer
        hook = sys.unraisablehook
        sys.unraisablehook = lambda _: None
        patches.callback(_new_manager)
        patches.callback(setattr, sys, "unraisablehook", hook)
        gc.freeze()  # collections would look at all imported modules again and again
        patches.callback(gc.unfreeze)
        patches.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(200_000, 5, 5)  # a seed leaves little behind, and collections were a seventh of its time
        yield


def _new_manager() -> None:
    """Reset the module state that belongs to the manager's process."""
    from slime.ray import shards
    from slime.rollout import collect, fully_async_rollout
    from slime.rollout.base_types import Count
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils import async_utils

    type(GenerateState).clear_instances(GenerateState)
    async_utils._thread = None
    fully_async_rollout._global_worker = None
    Count._open.clear()
    collect._cut_before.clear()
    shards._put.clear()


def _new_driver() -> None:
    """Reset the module state that belongs to the driver's process."""
    from slime.utils import async_utils, files

    async_utils._noted.clear()
    for lock in list(files._held):
        lock.close()


# ---------------------------------------------------------------- one run


def _command(mode: str, args: Namespace) -> None:
    from slime.backends.training.rules import nothing_left
    from slime.config.groups import RunConfig
    from slime.ray.run.main import train, train_async
    from slime.ray.run.restart import run_to_the_end

    if nothing_left(args) is None:
        run_to_the_end(train_async if MODES[mode][0] else train, RunConfig.of(args))


def _attempt(mode: str, root: Path) -> BaseException | None:
    """Run the command in a new driver process, to its end or death. Returns its error."""
    here = world()
    _new_driver()
    driver = here.process("driver")
    result: list[BaseException | None] = []

    def end(error: BaseException | None) -> None:
        if not result:
            result.append(error)
            here.wake(here.main)

    def body() -> None:
        try:
            _command(mode, arguments(mode, root))
        except Exception as error:
            end(error)
        else:
            end(None)

    driver.on_death.append(lambda: end(_Killed("the driver was killed")))
    here.spawn("main", body, driver)
    while not result and here.failure is None:
        here.park()
    if here.failure is not None:
        raise here.failure
    here.kill(driver)
    return result[0]


def _is_explained(error: BaseException) -> bool:
    """Whether faults may end a start with this error: deaths, silence and full disks, but never wrong data."""
    from slime.utils.errors import DeadlineExceeded, EngineError, ProcessDied, RequestRefused

    if isinstance(error, RequestRefused):
        return False
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.errno == errno.ENOSPC or "No space left" in str(error)
    expected = (ProcessDied, EngineError, DeadlineExceeded, RayActorError, _Killed)
    return isinstance(error, expected)


class _Killed(Exception):
    """The driver was killed."""


def _operate(here: World, mode: str, root: Path, planned: list[faults.Fault], errors: list[str]) -> int:
    """Start the command until it succeeds. After half of the starts nothing fails any more."""
    here.on_event = [(fault.at, functools.partial(faults.KINDS[fault.kind], here, fault)) for fault in planned]
    for number in range(1, _MAX_STARTS + 1):
        error = _attempt(mode, root)
        here.note(f"start {number} ended: {type(error).__name__ if error else 'finished'}")
        if error is None:
            return number
        errors.append(f"start {number}: {type(error).__name__}: {error}")
        if not _is_explained(error):
            raise AssertionError(f"no fault explains the end of start {errors[-1]}")
        if number >= _MAX_STARTS // 2:
            here.on_event = []
        here.sleep(45.0)
    raise AssertionError("the run did not finish:\n  " + "\n  ".join(errors))


def simulate(
    seed: int,
    *,
    keeps_trace: bool = False,
    mode: str | None = None,
    planned: list[faults.Fault] | None = None,
    num_rollouts: int = NUM_ROLLOUTS,
) -> Result:
    """Simulate the run of one seed. Call it in :func:`installed`.

    Args:
        planned: faults. None: those of the seed.
    """
    here = World(seed, keeps_trace=keeps_trace)
    random.seed(seed)
    mode = mode or here.random.choice(list(MODES))
    root = Path(tempfile.mkdtemp(prefix="slime-simulation-", dir=_memory()))
    here.globals.update(network=network.Network(here), disk=disk.Disk(here, root))
    here.globals.update(trained=[], counted=[], evaluated=[], labels=[], num_rollouts=num_rollouts)
    here.globals["new manager"] = _new_manager
    planned = faults.schedule(here) if planned is None else planned
    problems: list[str] = []
    errors: list[str] = []
    starts = 0

    def body() -> None:
        nonlocal starts
        starts = _operate(here, mode, root, planned, errors)
        problems.extend(broken_laws(here, mode, root, num_rollouts, MODES[mode][0]))
        # a full disk may refuse the journal: the run goes on without it
        if not any(fault.kind == "full disk" for fault in planned):
            problems.extend(changed_samples(here))

    try:
        here.run(body)
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
        problems.extend(errors)
        if keeps_trace:
            import traceback

            problems.append("".join(traceback.format_exception(error)))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return Result(seed, problems, here.digest, here.events, here.now, starts, mode, planned, here.trace or [], errors)


@functools.cache
def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
