"""The handoff of devices that trainer and engines share: the order in which they release and take memory.

    phase     engines hold                     trainer holds                     activity
    engines   weights, KV cache                nothing                           a rollout, an evaluation
                 | pause, flush, release
    trainer   nothing                          weights, gradients, optimizer     training, a checkpoint
                                                  | gradients and optimizer go
    sync      weights, as empty memory         weights                           a weight sync, engines paused
                 | KV cache, continue             | weights go
    engines   ...

One side releases its memory before the other takes it. With ``--release-train`` the trainer's processes end instead of
moving to host memory, and start again from the checkpoint. Actor and critic alternate in the same way.

Each step of the loop begins with the phase that it needs. All verbs of trainer and engines may be repeated, so this
module keeps no state: after an error the next step requests its phase again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from slime.backends import TRAINER_PARTS, EngineFleet, TrainerPart
from slime.config.arguments import ClusterArgs


def engines_share_devices(cluster: ClusterArgs) -> bool:
    """Whether engines run on the trainer's devices and release their memory for it."""
    return bool(cluster.colocate and cluster.offload_rollout and not cluster.debug_train_only)


class TrainerMemory(Protocol):
    """The memory verbs of a trainer group. Each returns when all ranks have finished."""

    def offload(self, parts: Sequence[TrainerPart] = ...) -> None: ...

    def onload(self, parts: Sequence[TrainerPart] = ...) -> None: ...

    def create(self) -> None:
        """Start the processes from the last checkpoint, unless they live."""

    def release(self) -> None:
        """End the processes."""


class EnginesMemory(Protocol):
    """The memory verbs of the engines that share devices with the trainer. Each returns when all have finished."""

    def offload(self) -> None:
        """Pause, flush the cache, release all memory."""

    def onload_weights(self) -> None:
        """Take memory for weights, which is empty before a sync unless the engine keeps a copy."""

    def onload_kv(self) -> None:
        """Take all memory and serve."""


@dataclass
class DeviceHandoff:
    """Hands the devices over.

    Attributes:
        trainer: the actor's ranks. None without training.
        critic: the critic's ranks, on the slots of the actor.
        engines: None if engines keep their memory (no ``--offload-rollout``).
        moves_trainer: ``--offload-train``.
        ends_trainer: ``--release-train``.
        seconds: spent since the last ``clear()``: ``sleep`` and ``wake_up`` of the trainer, ``engine_offload`` and
            ``engine_onload``.
    """

    trainer: TrainerMemory | None = None
    critic: TrainerMemory | None = None
    engines: EnginesMemory | None = None
    moves_trainer: bool = False
    ends_trainer: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def shares_devices(self) -> bool:
        """Whether the engines release their memory for the trainer."""
        return self.engines is not None

    def to_trainer(self) -> None:
        """Give the devices to the actor, to train or to save."""
        self._release_engines()
        self._move_out(self.critic)
        self._bring_back(self.trainer)

    def to_critic(self) -> None:
        """Give the devices to the critic."""
        self._release_engines()
        self._move_out(self.trainer)
        self._bring_back(self.critic)

    def to_sync(self) -> None:
        """Let trainer and engines hold weights and nothing else."""
        self._move_out(self.critic)
        self._bring_back(self.trainer, ("weights",))
        # After a training step, or after a restart of the processes, the other parts are on the device as well.
        if self.trainer is not None and (self.moves_trainer or self.ends_trainer):
            with self._timed("sleep"):
                self.trainer.offload(("gradients", "optimizer"))
        if self.engines is not None:
            with self._timed("engine_onload"):
                self.engines.onload_weights()

    def to_engines(self) -> None:
        """Give the devices to the engines, to serve."""
        self._move_out(self.trainer)
        self._move_out(self.critic)
        if self.engines is not None:
            with self._timed("engine_onload"):
                self.engines.onload_kv()

    @contextmanager
    def to_sync_with(self, newcomers: EngineFleet, timeout_s: float) -> Iterator[None]:
        """During a rollout: :meth:`to_sync` for engines that do not serve yet, then back to the engines."""
        if self.engines is not None:
            newcomers.start("release_memory_occupation", tags=["kv_cache"]).wait(timeout_s)
        self._bring_back(self.trainer, ("weights",))
        try:
            yield
        finally:
            self._move_out(self.trainer)
            if self.engines is not None:
                newcomers.start("resume_memory_occupation", tags=["kv_cache"]).wait(timeout_s)
                newcomers.start("continue_generation").wait(timeout_s)

    def _release_engines(self) -> None:
        if self.engines is not None:
            with self._timed("engine_offload"):
                self.engines.offload()

    def _move_out(self, group: TrainerMemory | None) -> None:
        if group is None or not (self.moves_trainer or self.ends_trainer):
            return
        with self._timed("sleep"):
            if self.ends_trainer:
                group.release()
            else:
                group.offload()

    def _bring_back(self, group: TrainerMemory | None, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        if group is None or not (self.moves_trainer or self.ends_trainer):
            return
        with self._timed("wake_up"):
            if self.ends_trainer:
                group.create()
            else:
                group.onload(parts)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
