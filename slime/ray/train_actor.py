"""One trainer rank as a Ray actor: gives a training backend its environment, its data and the engines.

The backend (``Trainer`` protocol) knows neither Ray nor engines. Called by ``actor_group`` on all ranks at once.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from slime.backends import SOURCE, TRAINER_PARTS, AdapterProof, Canary, Trainer, TrainerPart, TrainReport
from slime.backends.training.arguments import PrecisionArgs
from slime.config.arguments import ClusterArgs, SyncArgs
from slime.config.groups import RunConfig, from_args
from slime.data.engine_fields import FieldFlags
from slime.observability.logging_utils import configure_logger
from slime.ray.engines.fleet import RayEngineFleet
from slime.ray.run.cluster import node_address
from slime.ray.run.device_handoff import engines_share_devices
from slime.ray.shards import Box, boxed, check_provenance, process_rollout_data
from slime.ray.watch.heartbeat import register_process
from slime.rollout.arguments import DEFAULT_ROLLOUT_FUNCTION
from slime.utils import accelerator
from slime.utils.async_utils import exits_are_errors
from slime.utils.net import PortClaim, claim_ports
from slime.weight_sync.tensor_files import checksum_function, content_hash

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """One weight sync.

    Attributes:
        seconds: from the pause of the engines to their continuation, on the source rank. 0 elsewhere.
        num_bytes: bytes sent to each engine.
        changed_share: changed bytes over all bytes, if differences were sent.
        weights: tensor name -> checksum of what was sent, in deterministic mode. Else empty.
        proof: by which every engine can be asked whether it uses the adapter that was sent. None without an adapter.
        canary: the trainer's scores, to which those of every engine are compared. None with an adapter.
        root: the root hash of the version, which every engine holds. Empty if tensors are not compared.
    """

    seconds: float = 0.0
    num_bytes: int = 0
    changed_share: float | None = None
    proof: AdapterProof | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    canary: Canary | None = None
    root: str = ""

    @property
    def content_hash(self) -> str:
        """One hash of all weights."""
        return content_hash(self.weights)


@exits_are_errors
class TrainActor:
    """Body of the actor.

    Args:
        role: ``critic`` trains a value function and hands its values to the actor's rank of the same number.
    """

    def __init__(
        self, args: Namespace, rank: int, world_size: int, device_index: int, role: Literal["actor", "critic", "scorer"]
    ) -> None:
        from slime.ray.weight_updater import root_proof, weight_updater  # not above: the driver does without torch

        configure_logger(f" train-{rank}" if role == "actor" else f" {role}-{rank}")
        register_process(f"{'trainer' if role == 'actor' else role} rank {rank}", args.heartbeat_timeout)
        self._role = role
        for chatty in ("megatron", "megatron_fsdp"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._args = args
        self._sync_args = from_args(SyncArgs, args)
        self._rank = rank
        self._world_size = world_size
        self._device_index = accelerator.resolve_visible_device_id(device_index)
        self._trainer: Trainer | None = None
        self._weight_updater = weight_updater(RunConfig.of(args, is_shared=True), rank, world_size)
        is_compared = role == "actor" and not args.debug_train_only
        self._proof = root_proof(self._sync_args, args.hf_checkpoint) if is_compared else None
        self._kept_version: str | None = None
        self._rendezvous: PortClaim | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Address and a port of the node of rank 0."""
        # Claimed, because rank 0 listens there only seconds later, after the import of its trainer.
        host = node_address()
        self._rendezvous = claim_ports(host)
        return host, self._rendezvous.first

    def setup(self, master_address: str, master_port: int, with_ref: bool) -> int:
        """Join the other ranks and build the model. Returns the rollout id to start with."""
        os.environ.update(
            MASTER_ADDR=master_address,
            MASTER_PORT=str(master_port),
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_RANK=str(self._device_index),
        )
        # before the trainer is imported and built: allocations on device 0 would take memory of another rank
        accelerator.current().set_device(self._device_index)
        trainer = trainer_class(self._args.train_backend, self._role)
        self._trainer = trainer(self._args, rank=self._rank, world_size=self._world_size, with_ref=with_ref)
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
            versions: oldest and newest weights that generated it. None without engines.
            values: of each rank of the critic.
        """
        batch = self._batch(rollout_id, shards, versions)
        if values is not None:
            batch["values"] = ray.get(values[self._rank].inner, timeout=self._args.train_timeout)
        return self.trainer.train(rollout_id, batch)

    def reward_kl(self, rollout_id: int, shards: Sequence[Box], versions: tuple[str, str] | None) -> Box:
        """The KL divergence in the rewards and its coefficient, for the critic's rank of the same number."""
        rows = self.trainer.reward_kl(rollout_id, self._batch(rollout_id, shards, versions))
        return boxed([{"kl": rows, "kl_coef": self._args.kl_coef}])[0]

    def train_values(
        self,
        rollout_id: int,
        shards: Sequence[Box],
        versions: tuple[str, str] | None,
        kl: Sequence[Box] | None = None,
    ) -> tuple[TrainReport, Box]:
        """The critic's :meth:`train`. Returns its report and the values for the actor's rank of the same number.

        Args:
            kl: of each rank of the actor, from :meth:`reward_kl`.
        """
        batch = self._batch(rollout_id, shards, versions)
        if kl is not None:
            batch |= ray.get(kl[self._rank].inner, timeout=self._args.train_timeout)
        report, values = self.trainer.train_values(rollout_id, batch)
        return report, boxed([values])[0]

    def _batch(self, rollout_id: int, shards: Sequence[Box], versions: tuple[str, str] | None) -> dict[str, Any]:
        batch = process_rollout_data(self._args, shards, *self.trainer.data_parallel)
        keeps_older = self._args.partial_rollout or self._args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
        oldest, newest = versions or (None, None)
        check_provenance(rollout_id, batch, newest, oldest=oldest, allows_older=keeps_older)
        return batch if newest is None else batch | {"generated_by": newest}

    def save(self, rollout_id: int) -> None:
        self.trainer.save(rollout_id)

    def finish_saves(self) -> None:
        self.trainer.finish_saves()

    def save_hf(self, path: str) -> None:
        self.trainer.save_hf(path)

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        self.trainer.offload(parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        self.trainer.onload(parts)

    def update_weights(self, fleet: RayEngineFleet, version: str) -> SyncReport:
        """Send the weights to every engine of ``fleet``. All ranks take part in gathering them."""
        from slime.ray.weight_updater import canary_of
        from slime.weight_sync.session import WeightUpdate

        if self._args.keep_old_actor and version != self._kept_version:
            self.trainer.keep_version(version)
            self._kept_version = version
        started = time.monotonic()
        checks = self._sync_args.check_weight_update_equal and not accelerator.current().is_cpu
        update = WeightUpdate(
            version=version,
            max_chunk_bytes=self._sync_args.update_weight_buffer_size,
            timeout_s=self._sync_args.weight_sync_timeout,
            proof=self._proof,
            restores=checks and version == "0" and self._args.load is None,
            comes_again=self._args.use_fault_tolerance,
            continues=not engines_share_devices(from_args(ClusterArgs, self._args)),
        )
        num_bytes = self._weight_updater.update(fleet, self.trainer, update)
        seconds = time.monotonic() - started
        proof = self.trainer.adapter_proof(version)
        canary = None
        if proof is None and self._sync_args.weight_sync_proof != "none":  # an adapter's proof scores the same tokens
            precision, checkpoint = from_args(PrecisionArgs, self._args), self._args.hf_checkpoint
            canary = canary_of(checkpoint, precision, version, self.trainer.fixed_log_probs)  # a collective
        weights = self._checksums() if self._args.deterministic_mode else {}
        if not self.trainer.is_weight_source:
            return SyncReport()
        root = "" if self._proof is None else self._proof.root
        return SyncReport(seconds, num_bytes, self._weight_updater.changed_share, proof, weights, canary, root)

    def _checksums(self) -> dict[str, str]:
        """Tensor name -> checksum, on the source rank. A collective of all ranks."""
        from slime.utils.memory_utils import bytes_of

        num_exports = 2 if from_args(FieldFlags, self._args).serves_adapter else 1
        exports = [self.trainer.export_weights, self.trainer.export_adapter][:num_exports]
        exported = itertools.chain.from_iterable(export(recipients=SOURCE) for export in exports)
        # a separate pass: the tensors that a sync sends depend on transport, layout and quantization
        checksum = checksum_function("xxh3-128")
        return {name: checksum(bytes_of(tensor)) for name, tensor in exported}


def trainer_class(backend: str, role: Literal["actor", "critic", "scorer"]) -> Callable[..., Trainer]:
    """The class that trains ``role``. Its constructor takes args, rank, world_size and with_ref."""
    match backend, role:
        case "megatron", "critic":
            # Local imports: the backends are heavy, and Megatron may not be installed.
            from slime.backends.megatron_utils.actor import MegatronCritic

            return MegatronCritic
        case "megatron", "scorer":
            from slime.backends.megatron_utils.server.scorer import MegatronScorer

            return MegatronScorer
        case "megatron", "actor":
            from slime.backends.megatron_utils.actor import MegatronTrainer

            return MegatronTrainer
        case "fsdp", "actor":
            from slime.backends.fsdp_utils.actor import FsdpTrainer

            return FsdpTrainer
        case other:
            raise ValueError(f"no trainer for {other}")
