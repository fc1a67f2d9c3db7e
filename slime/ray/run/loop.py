"""The steps of a run, each a verb of the story that ``train.py`` tells. Shared by every driver.

who waits for whom
driver      the rollout manager (engines up, one rollout, one evaluation), the trainer (one rollout's steps, a sync)
trainer     engines, during a weight sync (with --use-fault-tolerance the driver makes the dead ones good: recovery.py)
manager     engines through the router, the Data Buffer, the user's reward
"""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray

from slime.backends.protocols import TrainReport
from slime.config.resolve.paths import needs_reference
from slime.config.roles import role_args
from slime.config.run_config import RunConfig
from slime.data.ledger import ledger_path
from slime.observability.step_metrics import Work, perf_metrics, step_line, warn_if_mismatched
from slime.observability.tracking import Tracker, create_tracker, run_directory
from slime.ray.actor_group import RayTrainGroup
from slime.ray.arguments import run_config
from slime.ray.critic import critic_args, needs_critic
from slime.ray.data_buffer import DataBufferClient, create_data_buffer
from slime.ray.engines.fleet import RayEngineFleet, RemoteEngineMemory, WaitingEngines
from slime.ray.engines.health import Recovery
from slime.ray.expectations import check_expectations
from slime.ray.placement_group import GpuSlots, create_placement_groups, release_placement_groups
from slime.ray.rollout import create_rollout_manager
from slime.ray.run.cluster import engines_share_devices
from slime.ray.run.device_handoff import DeviceHandoff
from slime.ray.run.prefetch import PrefetchedRollouts
from slime.ray.shards import RolloutResult
from slime.ray.train_actor import SyncReport
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.progress import Progress, phase
from slime.ray.watch.waiting import get, raise_if_dead
from slime.utils.errors import ConfigError, ProcessDied, SlimeError, StartFailed
from slime.utils.interrupt import acknowledge
from slime.utils.run_lock import RunLock, lock_save

logger = logging.getLogger(__name__)

_DISPOSE_TIMEOUT_S = 20.0
_FINISH_SAVES_TIMEOUT_S = 120.0


def is_due(rollout_id: int, interval: int | None, last: int | None = None) -> bool:
    """Whether a periodic action falls after rollout ``rollout_id``; always after the rollout ``last``."""
    return interval is not None and ((rollout_id + 1) % interval == 0 or rollout_id == last)


@dataclass
class Run:
    """A started run: its actors, where it begins, and one method per step."""

    config: RunConfig
    tracker: Tracker
    manager: Any
    data_buffer: DataBufferClient
    trainer: RayTrainGroup | None
    start_rollout_id: int
    num_rollout: int
    _fleet: RayEngineFleet | None
    slots: Mapping[str, GpuSlots]
    progress: Progress
    save_lock: RunLock | None = None
    critic: RayTrainGroup | None = None
    handoff: DeviceHandoff = field(default_factory=DeviceHandoff)
    _has_trained: bool = False
    _train_ended: float = 0.0
    _synced: SyncReport = field(default_factory=SyncReport)
    _version: str | None = None
    _num_trained: int = 0
    _next_step: int = 0
    _prefetched: PrefetchedRollouts[RolloutResult] | None = None
    _recovery: Recovery | None = None
    _evaluation: tuple[Any, int] | None = None
    _trainer_in_use: threading.Lock = field(default_factory=threading.Lock)
    _seconds: dict[str, float] = field(default_factory=dict)

    @property
    def args(self) -> Namespace:
        return self.config.args

    @property
    def rollout_ids(self) -> range:
        return range(self.start_rollout_id, self.num_rollout)

    @phase("engines", "generate")
    def generate(self, rollout_id: int) -> RolloutResult:
        """Prompts become scored samples, split for the trainer's ranks.

        The Data Buffer's state after this rollout is saved here, when a checkpoint will follow: later rollouts may be
        drawing prompts already by the time the trainer gets there.
        """
        self._let_engines_work()
        started = time.monotonic()
        version = self._version
        saves_state = is_due(rollout_id, self.args.save_interval, self.num_rollout - 1)
        ref = self.manager.generate.remote(rollout_id, saves_state)
        result = self._engines_work(ref, f"rollout {rollout_id}")
        seconds = time.monotonic() - started
        return replace(result, version=self._version, oldest_version=version, seconds=seconds)

    def _let_engines_work(self) -> None:
        if not self.args.is_async:  # there they work all the time
            self.handoff.to_engines()

    def _engines_work(self, ref: Any, what: str) -> Any:
        wait = get if self._recovery is None else self._recovery.get
        return wait(ref, self.args.rollout_timeout, what, "--rollout-timeout")

    def watch_engines(self) -> None:
        """From now on engines that die are made good (``--use-fault-tolerance``), or end the run at once."""
        self._recovery = Recovery(self.manager, self._send_current_weights, self.args.engine_start_timeout)

    def _send_current_weights(self, waiting: WaitingEngines) -> bool:
        """Weights for engines that started again in the middle of a rollout. False: they get them with the next sync.

        Other engines serve weights that the trainer may not have any more: then these wait until it sends new ones to
        all. With nobody serving, the trainer's are as good: the rest of the rollout is made by newer weights.
        """
        if self.trainer is None:
            return True  # nothing is trained: they serve the checkpoint, as the others do
        if not self._trainer_in_use.acquire(blocking=False):
            return False
        try:
            version = str(self._num_trained)
            if waiting.num_serving and (version != self._version or self.handoff.shares_devices):
                return False
            with self.handoff.to_sync_with(waiting.fleet, self.args.weight_sync_timeout):
                self.trainer.update_weights(waiting.fleet, version)
            self._version = version
            return True
        finally:
            self._trainer_in_use.release()

    def prefetch_rollouts(self) -> PrefetchedRollouts[RolloutResult]:
        """All rollouts of the run, generated up to ``--async-buffer-size`` ahead of the trainer."""
        self._prefetched = PrefetchedRollouts(
            self.generate,
            self.rollout_ids,
            capacity=self.args.async_buffer_size,
            timeout_s=self.args.rollout_timeout,
            fix="--rollout-timeout",
        )
        return self._prefetched

    @phase("trainer", "train")
    def train(self, rollout_id: int, rollout: RolloutResult) -> TrainReport | None:
        """Samples become a gradient, a gradient becomes new weights in the trainer."""
        if self.trainer is None:
            return None
        with self._trainer_in_use:
            if self.critic is None:
                self.handoff.to_trainer()
            else:
                self.handoff.to_critic()
            started = time.monotonic()
            self._seconds["train_wait"] = started - self._train_ended if self._has_trained else 0.0
            if self.critic is None:
                report = self.trainer.train(rollout_id, rollout.shards, rollout.versions)
            else:
                report = self._train_both(rollout_id, rollout)
            self._num_trained = rollout_id + 1
        self.data_buffer.trained(rollout_id)
        self._train_ended = time.monotonic()
        self._seconds["train"] = self._train_ended - started
        if not self._has_trained:
            self._has_trained = True
            self._seconds["first_step"] = time.time() - psutil.Process().create_time()
            logger.info("first trained step %.1f s after the start of the command", self._seconds["first_step"])
        return report

    def _train_both(self, rollout_id: int, rollout: RolloutResult) -> TrainReport:
        """The critic first: its values from before this update are the baseline of the policy's advantages."""
        assert self.trainer is not None
        assert self.critic is not None
        of_critic, values = self.critic.train_values(rollout_id, rollout.shards, rollout.versions)
        if rollout_id < self.args.num_critic_only_steps:
            return of_critic
        self.handoff.to_trainer()
        report = self.trainer.train(rollout_id, rollout.shards, rollout.versions, values)
        steps = [a | b for a, b in zip(report.steps, of_critic.steps, strict=True)]
        return replace(report, steps=steps, seconds=report.seconds | of_critic.seconds)

    @phase("trainer", "sync")
    def sync_weights(self, num_trained: int) -> None:
        """New weights become the engines' weights; their version is the number of rollouts they were trained on."""
        if self.trainer is None or self._fleet is None:
            return
        self.finish_evaluation()  # it is made by one set of weights
        trainer, version = self.trainer, str(num_trained)
        with self._trainer_in_use:
            self.handoff.to_sync()
            if self._recovery is None:
                report: SyncReport = trainer.update_weights(self._fleet, version)
            else:
                report = self._recovery.sync(lambda fleet: trainer.update_weights(fleet, version))
            self._version = version
            self.handoff.to_engines()
        self._seconds["sync"] = report.seconds
        self._synced = report

    def saves_after(self, rollout_id: int) -> bool:
        """Every ``--save-interval`` rollouts and after the last one; an export needs no interval for that."""
        last = self.num_rollout - 1
        exports_last = self.args.save_hf is not None and rollout_id == last
        return exports_last or is_due(rollout_id, self.args.save_interval, last)

    @phase("trainer", "save")
    def save(self, rollout_id: int) -> None:
        """The model, after the data state: the tracker file that makes a checkpoint count names a complete one.

        Without ``--save`` an export alone.
        """
        if self.trainer is None:
            return
        started = time.monotonic()
        with self._trainer_in_use:
            if self.critic is not None and self.args.save is not None:
                self.handoff.to_critic()
                self.critic.save(rollout_id)  # first: the actor's checkpoint is the one that counts
            self.handoff.to_trainer()
            if self.args.save is not None:
                self.trainer.save(rollout_id)
            if self.args.save_hf is not None:
                self.trainer.save_hf(self.args.save_hf.format(rollout_id=rollout_id))
        self._seconds["save_model"] = time.monotonic() - started

    @phase("engines", "eval")
    def evaluate(self, rollout_id: int, num_trained: int) -> dict[str, float]:
        """Score the held-out sets with the weights that were trained on ``num_trained`` rollouts.

        With ``--background-eval`` this only begins it; rollouts and training go on, new weights wait for it.
        """
        if self.args.debug_train_only:
            return {}
        self.finish_evaluation()
        self._let_engines_work()
        if self.args.background_eval:
            self._evaluation = (self.manager.eval.remote(rollout_id), num_trained)
            return {}
        with nullcontext() if self._prefetched is None else self._prefetched.engines_idle():
            self._evaluation = (self.manager.eval.remote(rollout_id), num_trained)
            return self.finish_evaluation()

    def finish_evaluation(self) -> dict[str, float]:
        """Wait for the evaluation that is under way, if there is one, and log it."""
        if self._evaluation is None:
            return {}
        (ref, num_trained), self._evaluation = self._evaluation, None
        metrics: dict[str, float] = self._engines_work(ref, f"the evaluation after {num_trained} rollouts")
        self.tracker.log(metrics | {"eval/step": num_trained}, step_key="eval/step")
        logger.info("eval after %d rollouts: %s", num_trained, {k: round(v, 4) for k, v in metrics.items()})
        return metrics

    def report(self, rollout_id: int, rollout: RolloutResult, training: TrainReport | None) -> None:
        """Metrics to the trackers and one line to the console."""
        metrics = dict(rollout.metrics)
        self._seconds["rollout"] = rollout.seconds
        if rollout.version is not None:
            metrics["rollout/weight_version_lag"] = float(rollout_id - int(rollout.version))
        phases = self._seconds | self.handoff.seconds | (training.seconds if training is not None else {})
        work = Work(
            num_tokens=rollout.num_tokens,
            forward_flops=rollout.forward_flops,
            num_ranks=self.args.world_size,
            num_synced_bytes=self._synced.num_bytes,
            changed_share=self._synced.changed_share,
        )
        metrics |= perf_metrics(phases, work)
        if training is not None:
            metrics |= {f"rollout/{name}": value for name, value in training.rollout.items()}
            warn_if_mismatched(rollout_id, training.steps, self.tracker.directory)
            # rollouts may have different numbers of steps, and an axis must not go back
            first = max(self._next_step, rollout_id * len(training.steps))
            self._next_step = first + len(training.steps)
            for number, step in enumerate(training.steps, start=first):
                values = {f"train/{name}": value for name, value in step.items()}
                self.tracker.log(values | {"train/step": number}, step_key="train/step")
        self.tracker.log(metrics | {"rollout/step": rollout_id}, step_key="rollout/step")
        last = training.steps[-1] if training is not None and training.steps else {}
        print(step_line(rollout_id, metrics, last, self._seconds), flush=True)
        self._seconds.clear()
        self.handoff.seconds.clear()
        if training is not None:
            check_expectations(self.args, rollout_id, training)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop everything. An error that is nobody's on purpose is what a death looks like to those who were left."""
        state = "failed"
        try:
            if error is None:
                self.finish_evaluation()
                state = "finished"
            elif isinstance(error, Exception) and not isinstance(error, SlimeError):
                actors = [self.manager, self.data_buffer.actor, *self._ranks()]
                raise_if_dead(actors, f"a process of the run, which failed with {type(error).__name__}")
        finally:
            self.progress.update(state=state)
            self._finish_saves()
            self.dispose()

    def _finish_saves(self) -> None:
        """What was being written when the run ended is a checkpoint as well, unless a rank that it needs is gone."""
        if self.trainer is None or not self.args.async_save:
            return
        acknowledge()
        try:
            raise_if_dead(self._ranks(), "a checkpoint that was being written")
            self.trainer.finish_saves(_FINISH_SAVES_TIMEOUT_S)
        except Exception as error:
            told = message_of(error) or str(error)
            logger.warning("the checkpoint that was being written does not count: %s", told.partition("\n")[0])

    def _ranks(self) -> list[Any]:
        return [rank for group in (self.trainer, self.critic) if group is not None for rank in group.ranks]

    def dispose(self) -> None:
        """Stop every process and close the trackers. Safe to call in any state; nothing of the run is left in Ray."""
        acknowledge()
        if self._prefetched is not None:
            self._prefetched.stop()
        try:
            get(self.manager.dispose.remote(), _DISPOSE_TIMEOUT_S, "the rollout manager to stop its engines")
        except Exception as error:  # whatever is left dies with the actors below
            logger.warning(
                "engines were not stopped in order: %s", (message_of(error) or str(error)).partition("\n")[0]
            )
        ray.kill(self.manager)
        self.data_buffer.kill()
        for group in (self.trainer, self.critic):
            if group is not None:
                group.kill()
        release_placement_groups(self.slots)
        self.tracker.close()
        if self.save_lock is not None:
            self.save_lock.close()


def start_run(args: Namespace) -> Run:
    """Start everything at once: engines and router, Data Buffer and trainer come up side by side.

    Engines that share devices with the trainer start first: they take a part of the free memory, and release it before
    the trainer starts. The first failure ends the start with its error, and everything already started is stopped.
    """
    run = _create_run(run_config(args))
    args, manager, data_buffer, slots = run.args, run.manager, run.data_buffer, run.slots
    try:
        ready = [manager.start.remote(), data_buffer.start()]
        num_rollout = _num_rollout(args, data_buffer, ready)
        run.config = run.config.with_facts(num_rollout=num_rollout)  # read by the trainer's learning-rate schedule
        if engines_share_devices(args):
            get(ready, args.trainer_start_timeout, "engines to start")
            run.handoff.engines = RemoteEngineMemory(manager, args.weight_sync_timeout)
            run.handoff.engines.offload()
        starts = [] if args.debug_rollout_only else _start_trainer(run, slots["actor"])
        results = get([*ready, *starts], args.trainer_start_timeout, "engines and trainer to start")
        run.start_rollout_id = run._num_trained = start = _start_id(args, results[len(ready) :])
        run.config = run.config.with_facts(start_rollout_id=start)
        run.num_rollout = num_rollout
        if not run.rollout_ids and num_rollout:
            text = "nothing is left to train: --load %s is at rollout %d, and --num-rollout is %d"
            logger.warning(text, args.load, run.start_rollout_id, num_rollout)
        data_buffer.begin(run.start_rollout_id)
        run.progress.update(first_rollout=run.start_rollout_id, num_rollout=num_rollout)
        run._fleet = get(manager.fleet.remote(), 60.0, "the rollout manager to name its engines")
        if not args.debug_train_only:
            run.watch_engines()
    except ProcessDied as death:
        run.dispose()
        raise StartFailed(f"the run could not start: {message_of(death)}") from None
    except BaseException:
        run.dispose()
        raise
    return run


def _create_run(config: RunConfig) -> Run:
    """Create everything that a run owns from the first moment; if one part fails, the parts before it are closed."""
    args = config.args
    with ExitStack() as made:
        tracker = create_tracker(args)
        made.callback(tracker.close)
        save_lock = None if args.save is None else made.enter_context(closing(lock_save(args.save)))
        slots = create_placement_groups(args)
        made.callback(release_placement_groups, slots)
        directory = run_directory(args)
        ledger = ledger_path(args.save, directory)
        data_buffer = create_data_buffer(args, ledger)
        made.callback(data_buffer.kill)
        progress = Progress(directory, ledger=str(ledger))
        manager = create_rollout_manager(args, slots["rollout"], data_buffer)
        run = Run(config, tracker, manager, data_buffer, None, 0, 0, None, slots, progress, save_lock=save_lock)
        made.pop_all()
    return run


def _start_trainer(run: Run, slots: GpuSlots) -> list[Any]:
    """Start building actor and critic. Returns refs to the rollout id that each rank would start with."""
    args = run.args
    of_actor = role_args(args, "actor")
    run.trainer = run.handoff.trainer = RayTrainGroup(of_actor, slots)
    run.handoff.moves_trainer, run.handoff.ends_trainer = args.offload_train, args.release_train
    starts = run.trainer.start_setup(needs_reference(of_actor))
    if not needs_critic(args):
        return starts
    if args.offload_train:  # one after the other
        get(starts, args.trainer_start_timeout, "the trainer to start")
        run.trainer.offload()
    run.critic = run.handoff.critic = RayTrainGroup(critic_args(args), slots, "critic")
    return starts + run.critic.start_setup(with_ref=False)


def _num_rollout(args: Namespace, data_buffer: DataBufferClient, ready: list[Any]) -> int:
    if args.num_rollout is not None:
        return args.num_rollout
    get(ready[-1:], args.trainer_start_timeout, "the Data Buffer to read the prompts")
    per_epoch = len(data_buffer) // args.rollout_batch_size
    if per_epoch == 0:
        raise ConfigError(
            f"--prompt-data {args.prompt_data} holds {len(data_buffer)} prompts, fewer than --rollout-batch-size "
            f"{args.rollout_batch_size}: an epoch would have no rollout."
        )
    return per_epoch * args.num_epoch


def _start_id(args: Namespace, loaded: list[int]) -> int:
    if args.start_rollout_id is not None:
        return args.start_rollout_id
    if len(set(loaded)) > 1:
        raise ConfigError(
            f"--load {args.load}: ranks would start at different rollouts: {sorted(set(loaded))}. Actor and critic "
            "need checkpoints of the same rollout."
        )
    return loaded[0] if loaded else 0
