"""The steps of a run, one method for each line of the story in ``train.py``. All drivers use them.

who waits for whom
driver      the rollout manager (engines up, one rollout, one evaluation), the trainer (one rollout's steps, a sync)
trainer     engines, during a weight sync (with --use-fault-tolerance the driver replaces dead ones: engines.recovery)
manager     engines through the router, the Data Buffer, the user's reward
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray

from slime.backends import EngineFleet, TrainReport
from slime.backends.training.checkpoint_files import iteration_directory
from slime.config.groups import RunConfig
from slime.data.schedule import WeightHistory
from slime.hooks import load_function
from slime.observability.console import Console, Row
from slime.observability.metric_utils import Work, perf_metrics, warn_if_mismatched
from slime.observability.tracking import Tracker
from slime.ray.actor_group import RayTrainGroup
from slime.ray.data_buffer import DataBufferClient
from slime.ray.engines.recovery import Recovery, RemoteEngines
from slime.ray.run.device_handoff import DeviceHandoff
from slime.ray.run.hub_push import HubPushes
from slime.ray.run.prefetch import PrefetchedRollouts
from slime.ray.shards import RolloutResult
from slime.ray.watch import get, raise_if_dead, warned
from slime.ray.watch.progress import CurrentPhases, Progress, phase
from slime.utils.async_utils import acknowledge
from slime.utils.errors import SlimeError
from slime.utils.misc import should_run_periodic_action

logger = logging.getLogger(__name__)

_DISPOSE_TIMEOUT_S = 20.0
_FINISH_SAVES_TIMEOUT_S = 1800.0
_JOURNAL_TIMEOUT_S = 600.0
_CHECKS = "slime_plugins.ci_test.check_expectations"


@dataclass(frozen=True)
class LoopArgs:
    """The arguments that the steps of a run read."""

    is_async: bool = False
    async_buffer_size: int = 1
    async_save: bool = False
    background_eval: bool = False
    ci_test: bool = False
    ci_load_grad_norm: str | None = None
    ci_save_grad_norm: str | None = None
    debug_train_only: bool = False
    engine_start_timeout: float = 0.0
    push_to_hub: str | None = None
    max_weight_staleness: int | None = None
    num_critic_only_steps: int = 0
    rollout_timeout: float = 0.0
    save: str | None = None
    save_hf: str | None = None
    save_interval: int | None = None
    weight_sync_timeout: float = 0.0
    world_size: int = 0

    @property
    def checks_numbers(self) -> bool:
        return self.ci_test or self.ci_load_grad_norm is not None or self.ci_save_grad_norm is not None


@dataclass(kw_only=True)
class RunHandles:
    """Everything that a run has started and must stop.

    Attributes:
        started: the rest, which is stopped with the processes: trackers, locks, device slots, the Data Buffer.
        console: writes the lines of the run.
        engine_port: the ``EnginePort`` of ``--engines-port``.
        trainers: groups of ranks in the order of their start: actor, critic.
        weights: records the hash of every version. None unless the run is deterministic.
    """

    tracker: Tracker
    manager: Any
    data_buffer: DataBufferClient
    progress: Progress
    started: ExitStack = field(default_factory=ExitStack)
    console: Console = field(default_factory=Console)
    weights: WeightHistory | None = None
    engine_port: Any = None
    trainers: list[RayTrainGroup] = field(default_factory=list)

    @property
    def ranks(self) -> list[Any]:
        return [rank for group in self.trainers for rank in group.ranks]

    def dispose(self) -> None:
        """Stop everything, in any state of the run. Nothing of it remains in Ray."""
        acknowledge()  # otherwise the waits below would raise the interrupt again
        if self.engine_port is not None:
            self.engine_port.close()
        # the actors die below with their children, whatever fails here
        with warned("engines were not stopped in order: %s"):
            get(self.manager.dispose.remote(), _DISPOSE_TIMEOUT_S, "the rollout manager to stop its engines")
        ray.kill(self.manager)
        for group in self.trainers:
            group.kill()
        self.started.close()


@dataclass(kw_only=True)
class Run:
    """A started run: one method per step.

    Attributes:
        rollout_ids: from the first rollout of this run to the end of training.
        rollouts_per_epoch: known if ``--num-epoch`` sets the length of the run.
        engines: None with ``--debug-train-only``.
        takes_weights: whether any engine receives weights.
        has_journal: whether the manager writes rollouts to a journal.
        trainer: None with ``--debug-rollout-only``.
        critic: trains a value function beside the policy.
        handoff: moves device memory between trainer and engines that share devices.
    """

    config: RunConfig
    handles: RunHandles
    rollout_ids: range
    rollouts_per_epoch: int | None = None
    engines: RemoteEngines | None = None
    takes_weights: bool = False
    has_journal: bool = False
    trainer: RayTrainGroup | None = None
    critic: RayTrainGroup | None = None
    handoff: DeviceHandoff = field(default_factory=DeviceHandoff)

    def __post_init__(self) -> None:
        self._args = self.config[LoopArgs]
        self._check_numbers = load_function(_CHECKS) if self._args.checks_numbers else None
        self._recovery: Recovery | None = None
        if self.engines is not None:
            self._recovery = Recovery(self.engines, self._send_current_weights, self._args.engine_start_timeout)
        self._trainer_in_use = threading.Lock()  # a generating thread may send weights to an engine that restarted
        self._prefetched: PrefetchedRollouts[RolloutResult] | None = None
        self._pushes = HubPushes(self._args.push_to_hub)
        self._evaluation: tuple[Any, int] | None = None
        self._version: str | None = None
        self._num_trained = self.start_rollout_id
        self._next_step = 0
        self._train_ended: float | None = None
        self._work = Work(num_ranks=self._args.world_size)
        self._seconds: dict[str, float] = {}
        self._live = ExitStack()

    @property
    def start_rollout_id(self) -> int:
        return self.rollout_ids.start

    @property
    def num_rollout(self) -> int:
        return self.rollout_ids.stop

    @property
    def progress(self) -> Progress:
        return self.handles.progress

    @phase("engines", "generate")
    def generate(self, rollout_id: int) -> RolloutResult:
        """Generate and score samples, split for the trainer's ranks."""
        self._let_engines_work()
        started = time.monotonic()
        version = self._version
        # The Data Buffer's state for a checkpoint is saved now: when the trainer gets there, later rollouts may
        # already draw prompts.
        saves_state = self.is_due(rollout_id, self._args.save_interval)
        ref = self.handles.manager.generate.remote(rollout_id, saves_state, version)
        result: RolloutResult = self._wait_for_engines(ref, f"rollout {rollout_id}")
        result = replace(result, seconds=time.monotonic() - started)
        if result.version is not None:  # an earlier start of the run has generated it
            return result
        return replace(result, version=self._version, oldest_version=version)

    def _let_engines_work(self) -> None:
        if not self._args.is_async:  # the engines of an asynchronous run always work
            self.handoff.to_engines()

    def _wait_for_engines(self, ref: Any, what: str) -> Any:
        wait = get if self._recovery is None else self._recovery.get
        return wait(ref, self._args.rollout_timeout, what, "--rollout-timeout")

    def _send_current_weights(self, fleet: EngineFleet, num_serving: int) -> bool:
        """Send weights to engines that restarted in the middle of a rollout. False: they wait for the next sync.

        They get the trainer's weights if those are the weights that serve, or if no engine serves: then newer weights
        generate the rest of the rollout.
        """
        if self.trainer is None or self._recovery is None:
            return True  # without training all engines serve the checkpoint
        if not self._trainer_in_use.acquire(blocking=False):  # training may hold it for minutes
            return False
        try:
            version = str(self._num_trained)
            if num_serving and (version != self._version or self.handoff.shares_devices):
                return False
            with self.handoff.to_sync_with(fleet, self._args.weight_sync_timeout):
                report = self.trainer.update_weights(fleet, version)
            self._recovery.verify(fleet, report, self._args.weight_sync_timeout)
            self._version = version
            return True
        finally:
            self._trainer_in_use.release()

    def prefetch_rollouts(self) -> PrefetchedRollouts[RolloutResult]:
        """All rollouts of the run, generated ahead of the trainer: up to ``--async-buffer-size``, or the staleness."""
        bounds = (self._args.async_buffer_size, self._args.max_weight_staleness)
        self._prefetched = PrefetchedRollouts(
            self.generate,
            self.rollout_ids,
            capacity=min(bound for bound in bounds if bound is not None),
            timeout_s=self._args.rollout_timeout,
            fix="--rollout-timeout",
        )
        return self._prefetched

    @phase("trainer", "train")
    def train(self, rollout_id: int, rollout: RolloutResult) -> TrainReport | None:
        """Train on one rollout."""
        if self.trainer is None:
            return None
        with self._trainer_in_use:
            if self.critic is None or self.trainer.has_reward_kl:
                self.handoff.to_trainer()
            else:
                self.handoff.to_critic()
            started = time.monotonic()
            self._seconds["train_wait"] = 0.0 if self._train_ended is None else started - self._train_ended
            if self.critic is None:
                report = self.trainer.train(rollout_id, rollout.shards, rollout.versions)
            else:
                report = self._train_both(self.trainer, self.critic, rollout_id, rollout)
            self._num_trained = rollout_id + 1
        if self.has_journal:
            # a start after a death must train on the same samples. Only a slow disk makes this wait long
            ref = self.handles.manager.await_journal.remote(rollout_id)
            get(ref, _JOURNAL_TIMEOUT_S, f"the rollout manager to write rollout {rollout_id} to the journal")
        self.handles.data_buffer.trained(rollout_id)
        is_first, self._train_ended = self._train_ended is None, time.monotonic()
        self._seconds["train"] = self._train_ended - started
        if is_first:
            self._seconds["first_step"] = time.time() - psutil.Process().create_time()
            logger.info("first trained step %.1f s after the start of the command", self._seconds["first_step"])
        return report

    def _train_both(
        self, trainer: RayTrainGroup, critic: RayTrainGroup, rollout_id: int, rollout: RolloutResult
    ) -> TrainReport:
        kl = None
        if trainer.has_reward_kl:  # the critic's returns have the penalty of the rewards
            kl = trainer.reward_kl(rollout_id, rollout.shards, rollout.versions)
            self.handoff.to_critic()
        # The critic trains first: its values from before this update are the baseline of the policy's advantages.
        of_critic, values = critic.train_values(rollout_id, rollout.shards, rollout.versions, kl)
        if rollout_id < self._args.num_critic_only_steps:
            return of_critic
        self.handoff.to_trainer()
        report = trainer.train(rollout_id, rollout.shards, rollout.versions, values)
        steps = [a | b for a, b in zip(report.steps, of_critic.steps, strict=True)]
        return replace(report, steps=steps, seconds=report.seconds | of_critic.seconds)

    @phase("trainer", "sync")
    def sync_weights(self, num_trained: int) -> None:
        """Send the trainer's weights to the engines. Their version is the number of rollouts they were trained on."""
        trainer = self.trainer
        if trainer is None or self._recovery is None or not self.takes_weights:
            return
        self.finish_evaluation()  # one set of weights generates an evaluation
        version = str(num_trained)
        with self._trainer_in_use:
            self.handoff.to_sync()
            fleet, report = self._recovery.sync(lambda fleet: (fleet, trainer.update_weights(fleet, version)))
            self._version = version
            self.handoff.to_engines()
        self._recovery.verify_sync(fleet, report, self._args.weight_sync_timeout)
        self._seconds["sync"] = report.seconds
        self._work = replace(self._work, num_synced_bytes=report.num_bytes, changed_share=report.changed_share)
        if self.handles.weights is not None and report.weights:
            other = self.handles.weights.add(num_trained, report.content_hash, report.weights)
            if other is not None:
                text = "weights of version %d differ from those before the restart, first in %s: not the same history"
                logger.warning(text, num_trained, other)

    def is_due(self, rollout_id: int, interval: int | None, *, at_epochs: bool = True) -> bool:
        """Every ``interval`` rollouts, after the last one, and after an epoch if ``--num-epoch`` sets their number."""
        per_epoch = self.rollouts_per_epoch if at_epochs else None
        return should_run_periodic_action(rollout_id, interval, per_epoch, self.num_rollout)

    def saves_after(self, rollout_id: int) -> bool:
        """As :meth:`is_due`. An export needs no interval for the last rollout."""
        exports_last = self._args.save_hf is not None and rollout_id == self.num_rollout - 1
        return exports_last or self.is_due(rollout_id, self._args.save_interval)

    @phase("trainer", "save")
    def save(self, rollout_id: int) -> None:
        """Save the model (``--save``) and export it (``--save-hf``)."""
        if self.trainer is None:
            return
        started, files = time.monotonic(), dict[str, float]()
        with self._trainer_in_use:
            if self.critic is not None and self._args.save is not None:
                self.handoff.to_critic()
                self.critic.save(rollout_id)  # before the actor, whose tracker file declares the checkpoint complete
            self.handoff.to_trainer()
            if self._args.save is not None:
                self.trainer.save(rollout_id)
                files[str(iteration_directory(self._args.save, rollout_id))] = time.monotonic() - started
            if self._args.save_hf is not None:
                path = self._args.save_hf.format(rollout_id=rollout_id)
                self._pushes.wait_for(path)
                self.trainer.save_hf(path)
                self._pushes.begin(path, rollout_id, self.handles.tracker.directory)
                files[path] = time.monotonic() - started - sum(files.values())
        self._seconds["save_model"] = time.monotonic() - started
        self.handles.console.saved(files, goes_on=self._args.async_save)

    @phase("engines", "eval")
    def evaluate(self, rollout_id: int, num_trained: int) -> dict[str, float]:
        """Score the held-out sets with the weights that were trained on ``num_trained`` rollouts.

        With ``--background-eval`` the evaluation only begins: rollouts and training go on, new weights wait for it.
        """
        if self._args.debug_train_only:
            return {}
        self.finish_evaluation()
        self._let_engines_work()
        if self._args.background_eval:
            self._evaluation = (self.handles.manager.eval.remote(rollout_id), num_trained)
            return {}
        with nullcontext() if self._prefetched is None else self._prefetched.engines_idle():
            self._evaluation = (self.handles.manager.eval.remote(rollout_id), num_trained)
            return self.finish_evaluation()

    def finish_evaluation(self) -> dict[str, float]:
        """Wait for the evaluation that is under way, if any, and log it."""
        if self._evaluation is None:
            return {}
        (ref, num_trained), self._evaluation = self._evaluation, None
        metrics: dict[str, float] = self._wait_for_engines(ref, f"the evaluation after {num_trained} rollouts")
        num_trained = max(num_trained, int(metrics.get("eval/weight_version", 0)))  # engines may have got newer weights
        self.handles.tracker.log(metrics | {"eval/step": num_trained}, step_key="eval/step")
        self.handles.console.evaluated(num_trained, metrics)
        return metrics

    def report(self, rollout_id: int, rollout: RolloutResult, training: TrainReport | None) -> None:
        """Write metrics to the trackers, and a line to the console."""
        tracker, metrics = self.handles.tracker, dict(rollout.metrics)
        self._seconds["rollout"] = rollout.seconds
        if rollout.version is not None:
            metrics["rollout/weight_version_lag"] = float(rollout_id - int(rollout.version))
        phases = self._seconds | self.handoff.seconds | (training.seconds if training is not None else {})
        work = replace(self._work, num_tokens=rollout.num_tokens, forward_flops=rollout.forward_flops)
        metrics |= perf_metrics(phases, work)
        if training is not None:
            metrics |= {f"rollout/{name}": value for name, value in training.rollout.items()}
            warn_if_mismatched(rollout_id, training.steps, tracker.directory)
            # Rollouts may have different numbers of steps, and the axis of a plot must not go back.
            first = max(self._next_step, rollout_id * len(training.steps))
            self._next_step = first + len(training.steps)
            for number, step in enumerate(training.steps, start=first):
                values = {f"train/{name}": value for name, value in step.items()}
                tracker.log(values | {"train/step": number}, step_key="train/step")
        tracker.log(metrics | {"rollout/step": rollout_id}, step_key="rollout/step")
        last = training.steps[-1] if training is not None and training.steps else {}
        row = Row(rollout_id, metrics, last, dict(self._seconds), rollout.num_groups, rollout.example)
        self.handles.console.rollout(row)
        self._seconds.clear()
        self.handoff.seconds.clear()
        if training is not None and self._check_numbers is not None:
            self._check_numbers(self.config.args, rollout_id, training)

    def __enter__(self) -> Run:
        shown = CurrentPhases(self.progress, self.handles.manager)
        console = self.handles.console
        self._live.enter_context(console.terminal.live(lambda: console.progress(shown.now())))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop everything. If the error is not one of slime's, first check whether a dead actor caused it."""
        self._live.close()
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            if error is None:
                self.finish_evaluation()
                state = "finished"
            elif isinstance(error, Exception) and not isinstance(error, SlimeError):
                actors = [self.handles.manager, self.handles.data_buffer.actor, *self.handles.ranks]
                raise_if_dead(actors, f"a process of the run, which failed with {type(error).__name__}")
        finally:
            self.progress.update(state=state)
            self.handles.console.finish(state)
            self._finish_saves()  # while the ranks live: dispose() kills them
            if self._prefetched is not None:
                self._prefetched.stop()
            self.handles.dispose()
            self._pushes.close(stops=error is not None)

    def _finish_saves(self) -> None:
        """Complete a checkpoint that is being written in the background, unless one of its ranks is dead."""
        if self.trainer is None or not self._args.async_save:
            return
        acknowledge()
        with warned("the checkpoint that was being written does not count: %s"):  # the run ends with its own error
            raise_if_dead(self.handles.ranks, "a checkpoint that was being written")
            self.trainer.finish_saves(_FINISH_SAVES_TIMEOUT_S)
