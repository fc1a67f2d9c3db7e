"""One trainer rank as a Ray actor: gives a training backend its environment, its data and the engines.

The backend (``Trainer`` protocol) knows neither Ray nor engines. Called by ``actor_group`` on all ranks at once.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from slime.backends.protocols import Trainer, TrainReport
from slime.backends.sglang_utils.checksum import expected_checksums
from slime.observability.logging_utils import configure_logger
from slime.ray.arguments import SyncArgs
from slime.ray.cluster import node_address
from slime.ray.failures import message_of
from slime.ray.fleet import RayEngineFleet
from slime.ray.shards import Box
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.utils import accelerator
from slime.utils.errors import DataError
from slime.utils.net import free_port
from slime.weight_sync.send_distributed import DistributedSender
from slime.weight_sync.session import WeightUpdate, push_weights

__all__ = ["SyncReport", "TrainActor", "check_provenance"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """One weight sync.

    Attributes:
        seconds: from the pause of the engines to their continuation, on the source rank; 0 elsewhere.
        num_bytes: bytes sent to each engine.
    """

    seconds: float = 0.0
    num_bytes: int = 0


class TrainActor:
    """Body of the actor.

    Args:
        role: ``critic`` trains a value function and hands its values to the actor's rank of the same number.
    """

    def __init__(
        self, args: Namespace, rank: int, world_size: int, device_index: int, role: Literal["actor", "critic"]
    ) -> None:
        configure_logger(f" train-{rank}" if role == "actor" else f" critic-{rank}")
        self._role = role
        for chatty in ("megatron", "megatron_fsdp"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._args = args
        self._sync_args = SyncArgs(
            args.update_weight_buffer_size,
            args.update_weights_interval,
            args.check_weight_update_equal,
            args.weight_sync_timeout,
        )
        self._rank = rank
        self._world_size = world_size
        self._device_index = device_index
        self._trainer: Trainer | None = None
        self._sender: DistributedSender | None = None
        self._fleet: RayEngineFleet | None = None
        self._group_numbers = itertools.count()
        self._kept_version: str | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Address and a free port of this rank's node; asked of rank 0."""
        return node_address(), free_port()

    def setup(self, master_address: str, master_port: int, with_ref: bool) -> int:
        """Join the other ranks and build the model. Returns the rollout id to start with."""
        os.environ.update(
            MASTER_ADDR=master_address,
            MASTER_PORT=str(master_port),
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_RANK=str(self._device_index),
        )
        accelerator.current().set_device(self._device_index)
        if self._role == "critic":
            from slime.backends.megatron_utils.critic import MegatronCritic

            self._trainer = MegatronCritic(self._args, rank=self._rank, world_size=self._world_size)
        else:
            from slime.backends.megatron_utils.actor import MegatronTrainer

            self._trainer = MegatronTrainer(self._args, rank=self._rank, world_size=self._world_size, with_ref=with_ref)
        return self._trainer.setup()

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "setup() comes first"
        return self._trainer

    def train(
        self,
        rollout_id: int,
        shards: Sequence[Box],
        versions: tuple[str, str] | None,
        values: Sequence[Box] | None = None,
    ) -> TrainReport:
        """Train on this rank's shard of rollout ``rollout_id``.

        Args:
            versions: oldest and newest weights that generated it; None where no engine did.
            values: what each rank of the critic returned.
        """
        batch = self._batch(rollout_id, shards, versions)
        if values is not None:
            batch["values"] = ray.get(values[self._rank].inner, timeout=self._args.train_timeout)
        return self.trainer.train(rollout_id, batch)

    def train_values(
        self, rollout_id: int, shards: Sequence[Box], versions: tuple[str, str] | None
    ) -> tuple[TrainReport, Box]:
        """The critic's :meth:`train`. Returns its report and the values for the actor's rank of the same number."""
        report, values = self.trainer.train_values(rollout_id, self._batch(rollout_id, shards, versions))
        return report, Box(ray.put(values))

    def _batch(self, rollout_id: int, shards: Sequence[Box], versions: tuple[str, str] | None) -> dict[str, Any]:
        dp_rank, dp_size = self.trainer.data_parallel
        if len(shards) != dp_size:
            raise DataError(
                f"rollout {rollout_id} was split for {len(shards)} data-parallel ranks, there are {dp_size}."
            )
        batch: dict[str, Any] = ray.get(shards[dp_rank].inner, timeout=self._args.train_timeout)
        keeps_older = self._args.partial_rollout or self._args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
        oldest, newest = versions or (None, None)
        check_provenance(rollout_id, batch, newest, oldest=oldest, allows_older=keeps_older)
        return batch if newest is None else batch | {"generated_by": newest}

    def save(self, rollout_id: int) -> None:
        self.trainer.save(rollout_id)

    def save_hf(self, path: str) -> None:
        self.trainer.save_hf(path)

    def update_weights(self, fleet: RayEngineFleet, version: str) -> SyncReport:
        """Send the weights to every engine of ``fleet``; all ranks take part in gathering them."""
        if self._args.keep_old_actor and version != self._kept_version:
            self.trainer.keep_version(version)
            self._kept_version = version
        weights = self.trainer.export_weights(self._sync_args.update_weight_buffer_size)
        if not self.trainer.is_weight_source:
            _exhaust(weights)
            return SyncReport()
        started = time.monotonic()
        update = WeightUpdate(
            version=version,
            max_chunk_bytes=self._sync_args.update_weight_buffer_size,
            timeout_s=self._sync_args.weight_sync_timeout,
            checksums=expected_checksums if self._sync_args.check_weight_update_equal else None,
            comes_again=self._args.use_fault_tolerance,
        )
        try:
            num_bytes = push_weights(fleet, self._connected(fleet), weights, update)
        except Exception:
            if self._args.use_fault_tolerance:  # the update comes again: the other ranks must be ready for it
                self._disconnect()
                _exhaust(weights)
            raise
        return SyncReport(time.monotonic() - started, num_bytes)

    def _connected(self, fleet: RayEngineFleet) -> DistributedSender:
        if self._sender is not None and self._fleet == fleet:
            return self._sender
        self._disconnect()
        # another name each time: an engine may not have left the group before
        name = f"slime-pp_{next(self._group_numbers)}"
        self._sender = DistributedSender(fleet, group_name=name, timeout_s=self._sync_args.weight_sync_timeout)
        self._sender.connect(node_address(), free_port())
        self._fleet = fleet
        return self._sender

    def _disconnect(self) -> None:
        """Leave the engines' group. An engine of it may be dead: those that live have left it then."""
        sender, self._sender = self._sender, None
        if sender is None:
            return
        try:
            sender.disconnect()
        except Exception as error:
            if not self._args.use_fault_tolerance:
                raise
            logger.info("left the group of the engines without all of them: %s", message_of(error) or error)


def _exhaust(weights: Iterable[Any]) -> None:
    """Take part in gathering them, to the end."""
    for _ in weights:
        pass


def check_provenance(
    rollout_id: int,
    batch: dict[str, Any],
    version: str | None,
    *,
    oldest: str | None = None,
    allows_older: bool = False,
) -> None:
    """Refuse tokens that other weights generated than those the engines were last given before the rollout.

    Args:
        version: what the engines held at the end of the rollout.
        oldest: what they held at its start, where that was something else.
        allows_older: responses may have been begun with earlier weights (``--partial-rollout``, rollout functions
            that keep groups under way).
    """
    if version is None:
        return  # replayed rollouts and supervised data: no engine was involved
    for index, versions in zip(batch["sample_indices"], batch.get("weight_versions") or [], strict=False):
        first = 0 if allows_older else int(oldest or version)
        foreign = {
            found
            for found in set(versions) - {version}
            if not (found.isdecimal() and first <= int(found) <= int(version))
        }
        if foreign:
            raise DataError(
                f"sample {index} of rollout {rollout_id} was generated with weight versions {versions}, but the "
                f"engines held version {version}: a weight sync did not reach the engine that made it."
            )
