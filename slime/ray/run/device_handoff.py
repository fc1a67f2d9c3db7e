"""Whose turn it is on the devices that trainer and engines share: the order in which memory changes hands.

    turn      engines hold                     trainer holds                     what happens in it
    engines   weights, KV cache                nothing                           a rollout, an evaluation
                 | pause, flush, release
    trainer   nothing                          weights, gradients, optimizer     training, a checkpoint
                                                  | gradients and optimizer go
    sync      weights, as empty memory         weights                           a weight sync; engines stay paused
                 | KV cache; continue             | weights go
    engines   ...

Whoever has to leave does so before the other one comes. With ``--release-train`` the trainer's processes end instead of
moving to host memory, and start again from the checkpoint. With a critic, actor and critic take turns as well.

Called by the loop's steps, each of which begins by asking for the turn it needs. Every verb that is called here may be
repeated, so nothing is remembered here: a turn that an error cut short is simply asked for again, and a run that ends
stops its engines in whatever state they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from slime.backends.protocols import TRAINER_PARTS, EngineFleet, TrainerPart


class TrainerMemory(Protocol):
    """A trainer group, as far as its memory is concerned. Each verb returns when all ranks have done it."""

    def offload(self, parts: Sequence[TrainerPart] = ...) -> None: ...

    def onload(self, parts: Sequence[TrainerPart] = ...) -> None: ...

    def create(self) -> None:
        """Start the processes and load the last checkpoint; nothing to do while they live."""

    def release(self) -> None:
        """End the processes."""


class EnginesMemory(Protocol):
    """The engines that share devices with the trainer. Each verb returns when all of them have done it."""

    def offload(self) -> None:
        """Pause, forget the cache, release everything."""

    def onload_weights(self) -> None:
        """Memory for weights again; there is nothing in it before a sync, unless the engine keeps a copy."""

    def onload_kv(self) -> None:
        """All memory again, and requests are served."""


@dataclass
class DeviceHandoff:
    """Hands the devices over.

    Attributes:
        trainer: the actor's ranks; None where nothing is trained.
        critic: the critic's ranks, on the slots of the actor's.
        engines: None where engines keep their memory (no ``--offload-rollout``).
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
        """The engines release their memory for the trainer."""
        return self.engines is not None

    def to_trainer(self) -> None:
        """The actor has its devices for itself, to train or to save."""
        self._release_engines()
        self._move_out(self.critic)
        self._bring_back(self.trainer)

    def to_critic(self) -> None:
        """The critic has the devices for itself."""
        self._release_engines()
        self._move_out(self.trainer)
        self._bring_back(self.critic)

    def to_sync(self) -> None:
        """Trainer and engines hold weights and nothing else."""
        self._move_out(self.critic)
        self._bring_back(self.trainer, ("weights",))
        if self.trainer is not None and (self.moves_trainer or self.ends_trainer):
            with self._timed("sleep"):
                self.trainer.offload(("gradients", "optimizer"))
        if self.engines is not None:
            with self._timed("engine_onload"):
                self.engines.onload_weights()

    def to_engines(self) -> None:
        """The engines have everything they need to serve."""
        self._move_out(self.trainer)
        self._move_out(self.critic)
        if self.engines is not None:
            with self._timed("engine_onload"):
                self.engines.onload_kv()

    @contextmanager
    def to_sync_with(self, newcomers: EngineFleet, timeout_s: float) -> Iterator[None]:
        """In the engines' turn: as :meth:`to_sync` for engines that serve nobody yet, and back to the engines' turn."""
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
