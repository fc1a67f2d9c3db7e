"""The start of a run: cluster slots, Data Buffer, rollout manager with engines, trainer and critic, side by side."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime.backends.training.rules import resumed_from
from slime.config.arguments import ClusterArgs
from slime.config.groups import RunConfig
from slime.data.schedule import WEIGHTS, WeightHistory, read_schedule
from slime.observability.console import START, Console, ConsoleArgs
from slime.observability.logging_utils import LOG_FILE, RUN_LOG
from slime.observability.tracking import create_tracker, run_directory
from slime.ray.actor_group import start_trainers
from slime.ray.data_buffer import DataBufferClient, create_data_buffer
from slime.ray.engines.recovery import RemoteEngines
from slime.ray.placement_group import GpuSlots, create_placement_groups, release_placement_groups
from slime.ray.rollout import create_rollout_manager
from slime.ray.run.device_handoff import DeviceHandoff, engines_share_devices
from slime.ray.run.engine_port import EnginePort
from slime.ray.run.loop import Run, RunHandles
from slime.ray.watch import get
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.progress import Progress
from slime.utils.errors import ConfigError, ProcessDied, StartFailed, undone
from slime.utils.files import lock_save

logger = logging.getLogger(__name__)

_ENGINES_GRACE_S = 120.0  # more than that of RolloutServers.wait_ready()
_SLICE_S = 0.2
_START_FLAGS = "--trainer-start-timeout, --engine-start-timeout"


@dataclass(frozen=True)
class StartArgs:
    """The arguments that the start of a run reads."""

    debug_rollout_only: bool = False
    debug_train_only: bool = False
    deterministic_mode: bool = False
    engine_start_timeout: float = 0.0
    engines_port: int | None = None
    load: str | None = None
    num_epoch: int = 1
    num_rollout: int | None = None
    offload_train: bool = False
    prompt_data: str | None = None
    release_train: bool = False
    replay_schedule: str | None = None
    rollout_batch_size: int = 1
    save: str | None = None
    start_rollout_id: int | None = None
    trainer_start_timeout: float = 0.0
    weight_sync_timeout: float = 0.0

    @property
    def all_start_timeout(self) -> float:
        """Seconds until engines and trainer run. Engines end their own start first: their error has the cause."""
        return max(self.trainer_start_timeout, self.engine_start_timeout + _ENGINES_GRACE_S)


def start_run(args: Namespace) -> Run:
    """Start everything at once: engines and router, Data Buffer and trainer come up side by side.

    Raises:
        StartFailed: a process died during the start. After any error the processes that already run are stopped.
    """
    config = RunConfig.of(args)
    handles, slots = _create_handles(config)
    with undone(handles.dispose):  # no process may survive
        try:
            with START.shown():
                run = _complete(config, handles, slots["actor"])
            handles.console.begin(run.rollout_ids)
            return run
        except ProcessDied as death:
            raise StartFailed(f"the run could not start: {message_of(death)}") from None


def _create_handles(config: RunConfig) -> tuple[RunHandles, Mapping[str, GpuSlots]]:
    """Create the actors, which start nothing yet. If one of them fails, the ones before it are stopped."""
    args, settings = config.args, config[StartArgs]
    with ExitStack() as made:
        if settings.save is not None:  # first: the lock shows whose files are there, if it is also the run's folder
            made.enter_context(closing(lock_save(settings.save)))
        is_new = resumed_from(args) is None and not settings.start_rollout_id
        tracker = create_tracker(args, is_new=is_new)
        made.callback(tracker.close)
        slots = create_placement_groups(args)
        made.callback(release_placement_groups, slots)
        directory = run_directory(args)
        RUN_LOG.open(directory / LOG_FILE)
        data_buffer, ledger = create_data_buffer(config, directory)
        made.callback(data_buffer.kill)
        progress = Progress(directory, ledger=str(ledger))
        weights = WeightHistory(ledger.with_name(WEIGHTS)) if settings.deterministic_mode else None
        manager = create_rollout_manager(config, slots["rollout"], data_buffer)
        started = made.pop_all()
    handles = RunHandles(
        tracker=tracker,
        manager=manager,
        data_buffer=data_buffer,
        progress=progress,
        started=started,
        console=Console(config[ConsoleArgs], directory),
        weights=weights,
    )
    return handles, slots


def _complete(config: RunConfig, handles: RunHandles, slots: GpuSlots) -> Run:
    settings, data_buffer = config[StartArgs], handles.data_buffer
    parts: dict[str, list[Any]] = {}

    def note() -> None:
        for name, refs in parts.items():
            if len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs):
                START.end(name)

    ready = [handles.manager.start.remote(), data_buffer.start()]
    parts |= _begin("data" if settings.debug_train_only else "engines", ready)
    num_rollout, per_epoch = _num_rollout(settings, data_buffer, ready[-1])
    config = config.with_facts(num_rollout=num_rollout)  # before the trainer: its learning-rate schedule needs it
    engines = None
    if not settings.debug_train_only:
        engines = RemoteEngines(handles.manager, settings.weight_sync_timeout)
    shared_engines = engines if engines_share_devices(config[ClusterArgs]) else None
    if shared_engines is not None:
        # Before the trainer: engines take a share of the memory that is free when they start, and give it back here.
        get(ready, settings.all_start_timeout, "engines to start", _START_FLAGS, reports_work=True, meanwhile=note)
        note()
        shared_engines.offload()
    starts = [] if settings.debug_rollout_only else start_trainers(config, slots, handles.trainers)
    parts |= _begin("trainer", starts)
    what, limit_s = "engines and trainer to start", settings.all_start_timeout
    results = get([*ready, *starts], limit_s, what, _START_FLAGS, reports_work=True, meanwhile=note, slice_s=_SLICE_S)
    note()
    start_id = _start_id(settings, results[len(ready) :])
    rollout_ids = range(start_id, _stop(settings, num_rollout))
    if not rollout_ids and num_rollout:
        text = "nothing is left to train: --load %s is at rollout %d, and --num-rollout is %d"
        logger.warning(text, settings.load, start_id, num_rollout)
    what = "the rollout manager to read the journal"
    begun = get(handles.manager.begin.remote(start_id), settings.trainer_start_timeout, what, "--trainer-start-timeout")
    first_new: int = start_id if begun is None else begun
    data_buffer.begin(first_new, start_id if first_new > start_id else None)
    if handles.weights is not None:
        handles.weights.begin(start_id, first_new)
    handles.progress.update(first_rollout=start_id, num_rollout=num_rollout)
    if engines is not None and settings.engines_port is not None:
        handles.engine_port = EnginePort(engines, settings.engines_port)
        handles.progress.update(engines_url=f"{handles.engine_port.url}/engines")
    trainer, critic = (*handles.trainers, None, None)[:2]
    return Run(
        config=config.with_facts(start_rollout_id=start_id),
        handles=handles,
        rollout_ids=rollout_ids,
        rollouts_per_epoch=per_epoch,
        engines=engines,
        takes_weights=engines is not None and engines.take_weights(),
        has_journal=begun is not None,
        trainer=trainer,
        critic=critic,
        handoff=DeviceHandoff(trainer, critic, shared_engines, settings.offload_train, settings.release_train),
    )


def _begin(name: str, refs: list[Any]) -> dict[str, list[Any]]:
    """Note the begin of a part of the start."""
    if refs:
        START.begin(name)
    return {name: refs} if refs else {}


def _num_rollout(settings: StartArgs, data_buffer: DataBufferClient, is_read: Any) -> tuple[int, int | None]:
    """Rollouts of the run, given or as many as the epochs of the prompt file have; and of an epoch in the second case.

    Args:
        is_read: ref of the Data Buffer's start.
    """
    if settings.num_rollout is not None:
        return settings.num_rollout, None
    get([is_read], settings.trainer_start_timeout, "the Data Buffer to read the prompts", "--trainer-start-timeout")
    per_epoch = len(data_buffer) // settings.rollout_batch_size
    if per_epoch == 0:
        raise ConfigError(
            f"--prompt-data {settings.prompt_data} holds {len(data_buffer)} prompts, fewer than --rollout-batch-size "
            f"{settings.rollout_batch_size}: an epoch would have no rollout."
        )
    return per_epoch * settings.num_epoch, per_epoch


def _stop(settings: StartArgs, num_rollout: int) -> int:
    """The end of the rollouts of this run. A recorded run may have been interrupted before its last one."""
    if settings.replay_schedule is None:
        return num_rollout
    return min(num_rollout, 1 + max(read_schedule(Path(settings.replay_schedule)), default=-1))


def _start_id(settings: StartArgs, loaded: Sequence[int]) -> int:
    if settings.start_rollout_id is not None:
        return settings.start_rollout_id
    if len(set(loaded)) > 1:
        raise ConfigError(
            f"--load {settings.load}: ranks would start at different rollouts: {sorted(set(loaded))}. Actor and critic "
            "need checkpoints of the same rollout."
        )
    return loaded[0] if loaded else 0
