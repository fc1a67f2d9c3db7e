"""One rank of the FSDP backend: the ``Trainer`` protocol on a model of transformers, sharded by torch.

    setup()   groups -> model, optimizer -> checkpoint (this backend's or HF) -> reference weights in host memory

``training.trainer`` has the order of the work on a batch, this module the sharded model. Called by
``slime.ray.train_actor`` on all ranks at once.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.backends.fsdp_utils import checkpoint
from slime.backends.fsdp_utils.adapters import (
    Adapters,
    adapter_parameters,
    adapters_off,
    export_adapters,
    fill_adapters,
)
from slime.backends.fsdp_utils.arguments import FsdpArgs
from slime.backends.fsdp_utils.hf_weights import export_weights, load_weights
from slime.backends.fsdp_utils.model import build_model, local_tensor, local_tensors, read_config
from slime.backends.fsdp_utils.step import TrainState, build_optimizer, outputs_by_sample, reset_moments, train_step
from slime.backends.protocols import EVERY_RANK, SOURCE, NamedTensor, Recipients, TrainerPart, weights_dtype
from slime.backends.training.adapter_files import save_adapter, shared_description
from slime.backends.training.arguments import OptimizerArgs, ParallelArgs, TrainerArgs
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.data import RankPlace, TrainBatch, row_multiple
from slime.backends.training.hf_files import TensorReader, save_hf_directory
from slime.backends.training.loss import LossContext
from slime.backends.training.offload import DeviceMemory, WeightBackup
from slime.backends.training.optimizer import RateSchedule, ScheduledRates
from slime.backends.training.steps import ReadOutput, StepResult
from slime.backends.training.trainer import TrainerBase
from slime.batch.arguments import BatchArgs
from slime.config.arguments import ClusterArgs
from slime.config.groups import from_args
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils import accelerator
from slime.utils.distributed_utils import init_default_group
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


class FsdpTrainer(TrainerBase):
    """See the module docstring. ``MASTER_ADDR`` and its companions are set by the caller."""

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool) -> None:
        # Before the base class, which takes the size of the vocabulary.
        self._config = read_config(args.hf_checkpoint)
        super().__init__(args, rank=rank, world_size=world_size, with_ref=with_ref, vocab_size=self._config.vocab_size)
        self._dtype = getattr(torch, weights_dtype(fp16=args.fp16, fp32=args.fp32))
        self._names = TensorReader(args.hf_checkpoint, "--hf-checkpoint").names
        self._state: TrainState | None = None

    # ------------------------------------------------------------------------------------------------ setup

    def setup(self) -> int:
        """Build the model and load the checkpoint. Returns the rollout id to start with."""
        started = time.monotonic()
        mesh = self._join(from_args(ParallelArgs, self._args), from_args(TrainerArgs, self._args))
        self._profiler.begin()
        self._state = self._build(mesh)
        self._memory = DeviceMemory(self._held, self._drop_gradients)
        if from_args(ClusterArgs, self._args).offload_train:
            self._memory.pin_ahead(num_moments=0)  # no tensor of the optimizer exists yet
        start = self._load_weights()
        if self._place.is_main:
            logger.info("trainer ready in %.1f s, starting with rollout %d", time.monotonic() - started, start)
        return start

    def _join(self, parallel: ParallelArgs, trainer: TrainerArgs) -> DeviceMesh:
        """The default group and the seeds. Waits at most --distributed-timeout-minutes."""
        backend = parallel.distributed_backend or accelerator.current().communication_backend
        init_default_group(backend, timeout_s=parallel.distributed_timeout_minutes * 60)
        random.seed(trainer.seed)
        np.random.seed(trainer.seed)
        torch.manual_seed(trainer.seed)
        if trainer.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        cp_size = parallel.context_parallel_size
        # As in the Megatron backend: rank = data-parallel rank * context-parallel size + context-parallel rank.
        shape = (self._world_size // cp_size, cp_size)
        return init_device_mesh(accelerator.current().device().type, shape, mesh_dim_names=("dp", "cp"))

    def _build(self, mesh: DeviceMesh) -> TrainState:
        args = self._args
        settings = from_args(OptimizerArgs, args)
        dp_size, cp_size = mesh.shape
        model = build_model(
            self._config,
            # Weights are sharded over context-parallel ranks too.
            init_device_mesh(mesh.device_type, (self._world_size,)),
            compute_dtype=self._dtype,
            attention=from_args(FsdpArgs, args).attn_implementation,
            checkpoints_layers=args.recompute_granularity == "full",
            adapters=None if self._lora is None else Adapters.of(self._lora, self._shape),
        )
        optimizer = build_optimizer(model, settings, is_stateless=self._copies.use_stateless_adam)
        samples = (args.num_rollout or 0) * args.rollout_batch_size * args.n_samples_per_prompt
        schedule = RateSchedule.of(
            settings, num_steps=samples // args.global_batch_size, global_batch_size=args.global_batch_size
        )
        dp_rank, cp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
        return TrainState(
            model=model,
            optimizer=optimizer,
            rates=ScheduledRates(optimizer, schedule, follows_checkpoint=settings.use_checkpoint_opt_param_scheduler),
            sharding=Sharding(
                cp_rank,
                cp_size,
                mesh.get_group("cp") if cp_size > 1 else None,
                sequence_multiple=row_multiple(from_args(BatchArgs, args)),
            ),
            place=RankPlace(
                dp_rank=dp_rank,
                dp_size=dp_size,
                dp_group=mesh.get_group("dp"),
                cp_size=cp_size,
                is_main=dist.get_rank() == 0,
                keeps_batch=cp_rank == 0,
            ),
            clip_grad=settings.clip_grad,
            adapter=None if self._lora is None else shared_description(self._lora, self._shape, args.hf_checkpoint),
        )

    @property
    def _ready(self) -> TrainState:
        assert self._state is not None, "setup() comes first"
        return self._state

    @property
    def _place(self) -> RankPlace:
        return self._ready.place

    # ------------------------------------------------------------------------------------------------ training

    def _train_batch(self, batch: Mapping[str, Any]) -> TrainBatch:
        shares, device = self._shares_prefixes, accelerator.current().device()
        return TrainBatch(dict(batch), device, self._ready.sharding, shares_prefixes=shares)

    def _outputs(
        self, batch: TrainBatch, read: ReadOutput, shape: tuple[int, ...] = (), store_prefix: str = ""
    ) -> list[torch.Tensor]:
        return outputs_by_sample(self._ready.model, batch, read)

    def _step(self, rollout_id: int, step: int, context: LossContext) -> StepResult:
        return train_step(self._ready, context, step)

    def _reset_moments(self) -> None:
        reset_moments(self._ready.optimizer)

    # ------------------------------------------------------------------------------------------------ weights

    @functools.cached_property
    def _shape(self) -> ModelShape:
        """The shape of the model, which only runs with adapters need."""
        return read_shape(self._args.hf_checkpoint)

    def _copied_weights(self) -> WeightBackup:
        if self._lora is None:
            return WeightBackup(local_tensors(self._ready.model))
        return WeightBackup(local_tensor(value) for _, value in adapter_parameters(self._ready.model))

    def _fill_adapters(self) -> None:
        assert self._lora is not None, "the caller has asked"
        fill_adapters(self._ready.model, self._lora, self._args.seed)

    def _adapters_off(self) -> AbstractContextManager[None]:
        return adapters_off(self._ready.model)

    @property
    def _adapter(self) -> Mapping[str, Any] | None:
        return self._ready.adapter

    def _fill(self, source: Source) -> None:
        if source.format == "hf":
            load_weights(self._ready.model, source.directory, source.flag)
        else:
            checkpoint.load_weights(self._ready, source)

    def _resume(self, source: Source, *, has_optimizer: bool, has_rng: bool) -> None:
        checkpoint.load_training_state(self._ready, source, has_optimizer=has_optimizer, has_rng=has_rng)

    def save(self, rollout_id: int) -> None:
        """Write ``<save>/iter_<rollout_id>``. It is complete when this returns on all ranks."""
        self._device.require(["weights", "optimizer"], "a checkpoint")
        settings = self._checkpoint
        if settings.save is None:
            raise ConfigError("--save is required to write a checkpoint.")
        checkpoint.save(
            self._ready,
            settings.save,
            rollout_id,
            has_optimizer=not settings.no_save_optim,
            has_rng=not settings.no_save_rng,
            keep=settings.keep_last_checkpoints,
        )

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint at ``path``. An error of a writing rank is raised on all ranks."""
        self._device.require(["weights"], "a Hugging Face checkpoint")
        if self._lora is not None and not self._lora.merge:
            weights = export_adapters(self._ready.model, None, SOURCE)
            save_adapter(weights, self._lora, self._shape, self._args.hf_checkpoint, path)
        else:
            save_hf_directory(self.export_weights(), self._args.hf_checkpoint, path)

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full. With adapters those of the base, or merged ones."""
        self._device.require(["weights"], "the export of weights")
        # One tensor at a time, whatever ``bucket_bytes`` is.
        merges = self._lora is not None and self._lora.merge
        return export_weights(self._ready.model, self._names, self._dtype, recipients, merges=merges)

    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """The adapters under peft's names without prefix, whole."""
        self._device.require(["weights"], "the export of adapters")
        return export_adapters(self._ready.model, self._dtype, recipients)

    # ------------------------------------------------------------------------------------------------ memory

    def _held(self, part: TrainerPart) -> Iterator[torch.Tensor]:
        match part:
            case "weights":
                yield from (local_tensor(parameter) for parameter in self._ready.model.parameters())
                yield from self._ready.model.buffers()
            case "gradients":  # they exist during a step only
                return
            case "optimizer":
                for state in self._ready.optimizer.state.values():
                    # without the step counts, of 4 bytes
                    tensors = (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
                    yield from map(local_tensor, tensors)
            case _:
                raise ValueError(f"unknown part {part!r}")

    def _drop_gradients(self) -> None:
        self._ready.optimizer.zero_grad(set_to_none=True)  # gradients of zeros would keep their memory
