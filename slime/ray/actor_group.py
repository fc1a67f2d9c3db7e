"""All trainer ranks of one role as one object. The driver calls the group, never a rank."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal

import ray

from slime.algorithms.arguments import needs_reference
from slime.backends import TRAINER_PARTS, EngineFleet, TrainerPart, TrainReport
from slime.config.groups import RunConfig
from slime.config.roles import critic_args, needs_critic, role_args
from slime.ray.placement_group import GpuSlots
from slime.ray.run.cluster import NOSET_VISIBLE_DEVICES, allocator_env, nccl_as_engines, worker_env
from slime.ray.run.restart import continued
from slime.ray.run.worker_launcher import WORKER_ROLE
from slime.ray.shards import Box, actor_options
from slime.ray.train_actor import SyncReport, TrainActor
from slime.ray.watch import get

logger = logging.getLogger(__name__)

_SYNC_GRACE_S = 180.0  # after the deadline of a weight sync, for the ranks to name the engine that did not answer
_END_TIMEOUT_S = 30.0


class RayTrainGroup:
    """``world_size`` ranks on the given slots, rank r on slot r. An actor, a critic and an engine fit on one slot."""

    def __init__(
        self,
        args: Namespace,
        slots: GpuSlots,
        role: Literal["actor", "critic", "scorer"] = "actor",
        actor_cls: type[TrainActor] = TrainActor,
    ) -> None:
        self._args = args
        self._slots = slots
        self._role = role
        self._actor_cls = actor_cls
        self._name = "the trainer" if role == "actor" else f"the {role}"
        self._with_ref = False
        self._ranks = self._start()

    def _start(self) -> list[Any]:
        env = worker_env() | NOSET_VISIBLE_DEVICES | nccl_as_engines(self._args.sglang_argv)
        env[WORKER_ROLE] = "trainer"
        if self._args.deterministic_mode:
            # without it torch refuses the first matrix product
            env["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        env |= {key: str(value) for key, value in self._args.train_env_vars.items()}
        env |= allocator_env(self._args.train_env_vars)
        actor, slots = ray.remote(self._actor_cls), self._slots
        return [
            actor.options(
                num_cpus=0.4,
                num_gpus=0.4,
                scheduling_strategy=slots.strategy(rank),
                runtime_env={"env_vars": env},
                **actor_options(self._args.rollout_data_transport),
            ).remote(self._args, rank, len(slots), slots.device_ids[rank], self._role)
            for rank in range(len(slots))
        ]

    @property
    def ranks(self) -> list[Any]:
        """Handles of the actors."""
        return list(self._ranks)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(rank, method).remote(*arguments) for rank in self._ranks]

    def start_setup(self, with_ref: bool) -> list[Any]:
        """Start building the model on all ranks. Returns refs to the rollout id each would start with."""
        self._with_ref = with_ref
        address, port = get(
            self._ranks[0].rendezvous.remote(), self._args.trainer_start_timeout, f"rank 0 of {self._name} to start"
        )
        return self._all("setup", address, port, with_ref)

    def train(
        self,
        rollout_id: int,
        shards: Sequence[Box],
        versions: tuple[str, str] | None,
        values: Sequence[Box] | None = None,
    ) -> TrainReport:
        """Train on one rollout of weights from the oldest to the newest of ``versions``. Returns the main report."""
        refs = self._all("train", rollout_id, shards, versions, values)
        return _main_report(get(refs, self._args.train_timeout, f"{self._name} to train on rollout {rollout_id}"))

    @property
    def has_reward_kl(self) -> bool:
        """Whether the critic must know :meth:`reward_kl` of this policy."""
        return self._args.kl_coef != 0 and not self._args.critic_without_kl

    def reward_kl(self, rollout_id: int, shards: Sequence[Box], versions: tuple[str, str] | None) -> list[Box]:
        """Every rank's KL divergence in the rewards, for the critic."""
        refs = self._all("reward_kl", rollout_id, shards, versions)
        boxes: list[Box] = get(
            refs, self._args.train_timeout, f"{self._name} to compute the KL of rollout {rollout_id}"
        )
        return boxes

    def train_values(
        self,
        rollout_id: int,
        shards: Sequence[Box],
        versions: tuple[str, str] | None,
        kl: Sequence[Box] | None = None,
    ) -> tuple[TrainReport, list[Box]]:
        """The critic's :meth:`train`. Returns its report, and every rank's values for the actor."""
        refs = self._all("train_values", rollout_id, shards, versions, kl)
        results = get(refs, self._args.train_timeout, f"{self._name} to train on rollout {rollout_id}")
        return _main_report([report for report, _ in results]), [values for _, values in results]

    def update_weights(self, fleet: EngineFleet, version: str) -> SyncReport:
        refs = self._all("update_weights", fleet, version)
        what = f"the trainer to send weight version {version} to {len(fleet.engines)} engines"
        seconds = self._args.weight_sync_timeout + _SYNC_GRACE_S
        reports: list[SyncReport] = get(refs, seconds, what)
        return max(reports, key=lambda report: report.seconds)

    def save(self, rollout_id: int) -> None:
        get(self._all("save", rollout_id), self._args.train_timeout, f"the checkpoint of rollout {rollout_id}")

    def finish_saves(self, timeout_s: float) -> None:
        get(self._all("finish_saves"), timeout_s, "the checkpoint that is written in the background")

    def save_hf(self, path: str) -> None:
        get(self._all("save_hf", path), self._args.train_timeout, f"the Hugging Face export to {path}")

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Release the device memory of ``parts``, on all ranks."""
        what = f"{self._name} to offload {', '.join(parts)}"
        get(self._all("offload", parts), self._args.train_timeout, what)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Take device memory for ``parts``, on all ranks."""
        what = f"{self._name} to take {', '.join(parts)} back"
        get(self._all("onload", parts), self._args.train_timeout, what)

    def create(self) -> None:
        """Start the ranks again from the last checkpoint, if :meth:`release` has ended them."""
        if self._ranks:
            return
        self._args = continued(RunConfig.of(self._args)).args
        self._ranks = self._start()
        starts = self.start_setup(self._with_ref)
        what, fix = f"{self._name} to start again", "--trainer-start-timeout"
        get(starts, self._args.trainer_start_timeout, what, fix, reports_work=True)

    def release(self) -> None:
        """End the ranks, whose state must be in a checkpoint. Returns when the processes have ended."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)
        calls = [rank.__ray_ready__.remote() for rank in ranks]  # fail when the processes are gone
        alive = ray.wait(calls, num_returns=len(calls), timeout=_END_TIMEOUT_S)[1] if calls else []
        if alive:
            logger.warning("%d ranks of %s have not ended within %g s", len(alive), self._name, _END_TIMEOUT_S)

    def kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)


def start_trainers(config: RunConfig, slots: GpuSlots, started: list[RayTrainGroup]) -> list[Any]:
    """Start actor and critic, and add them to ``started``. Returns refs to the rollout ids of their checkpoints."""
    args = config.args
    of_actor = role_args(args, "actor")
    trainer = RayTrainGroup(of_actor, slots)
    started.append(trainer)
    starts = trainer.start_setup(needs_reference(of_actor))
    if not needs_critic(args):
        return starts
    if args.offload_train:  # both models do not fit at once: the actor leaves before the critic is built
        get(starts, args.trainer_start_timeout, "the trainer to start", "--trainer-start-timeout", reports_work=True)
        trainer.offload()
    critic = RayTrainGroup(critic_args(args), slots, "critic")
    started.append(critic)
    return starts + critic.start_setup(with_ref=False)


def _main_report(reports: Sequence[TrainReport]) -> TrainReport:
    return next((report for report in reports if report.steps), reports[0])
