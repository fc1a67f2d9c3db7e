"""One rank of the FSDP backend: the ``Trainer`` protocol on a model of transformers, sharded by torch.

    setup()   groups -> model, optimizer -> checkpoint (this backend's or HF) -> reference weights in host memory

``training.trainer`` has the order of the work on a batch, this module the sharded model. Called by
``slime.ray.train_actor`` on all ranks at once.
"""

from __future__ import annotations

import logging
import random
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.backends import TrainerPart
from slime.backends.fsdp_utils.arguments import FsdpArgs
from slime.backends.fsdp_utils.model import Adapters, build_model, local_tensor, read_config
from slime.backends.fsdp_utils.step import TrainState, build_optimizer, outputs_by_sample, reset_moments, train_step
from slime.backends.fsdp_utils.weights import FsdpWeights
from slime.backends.training.adapter_files import shared_description
from slime.backends.training.arguments import OptimizerArgs, ParallelArgs, PrecisionArgs, TrainerArgs
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.data import RankPlace, TrainBatch, row_multiple
from slime.backends.training.loss import LossContext
from slime.backends.training.offload import DeviceMemory
from slime.backends.training.optimizer import RateSchedule, ScheduledRates, dtype_of
from slime.backends.training.steps import ReadOutput, StepResult
from slime.batch.arguments import BatchArgs
from slime.config.arguments import ClusterArgs
from slime.config.groups import from_args
from slime.utils import accelerator
from slime.utils.distributed_utils import init_default_group

logger = logging.getLogger(__name__)


class FsdpTrainer(FsdpWeights):
    """See the module docstring. ``MASTER_ADDR`` and its companions are set by the caller."""

    def __init__(self, args: Namespace, *, rank: int, world_size: int, with_ref: bool) -> None:
        # Before the base class, which takes the size of the vocabulary.
        self._config = read_config(args.hf_checkpoint)
        super().__init__(args, rank=rank, world_size=world_size, with_ref=with_ref, vocab_size=self._config.vocab_size)
        self._dtype = dtype_of(from_args(PrecisionArgs, args))

    # ------------------------------------------------------------------------------------------------ setup

    def setup(self) -> int:
        """Build the model and load the checkpoint. Returns the rollout id to start with."""
        started = time.monotonic()
        mesh = self._join(from_args(ParallelArgs, self._args), from_args(TrainerArgs, self._args))
        self._place = _place_of(mesh)
        self._profiler.begin()
        self._ready = self._build(mesh)
        self._device = DeviceMemory(self._held, self._drop_gradients)
        cluster = from_args(ClusterArgs, self._args)
        if cluster.offload_train:
            self._device.pin_ahead(num_moments=0)  # no tensor of the optimizer exists yet
        if cluster.offload_communicators:
            self._device.take_communicators()
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
        cp_size = self._place.cp_size
        return TrainState(
            model=model,
            optimizer=optimizer,
            rates=ScheduledRates(optimizer, schedule, follows_checkpoint=settings.use_checkpoint_opt_param_scheduler),
            sharding=Sharding(
                mesh.get_local_rank("cp"),
                cp_size,
                mesh.get_group("cp") if cp_size > 1 else None,
                sequence_multiple=row_multiple(from_args(BatchArgs, args)),
            ),
            clip_grad=settings.clip_grad,
            adapter=None if self._lora is None else shared_description(self._lora, self._shape, args.hf_checkpoint),
        )

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


def _place_of(mesh: DeviceMesh) -> RankPlace:
    dp_size, cp_size = mesh.shape
    return RankPlace(
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=dp_size,
        dp_group=mesh.get_group("dp"),
        cp_size=cp_size,
        is_main=dist.get_rank() == 0,
        keeps_batch=mesh.get_local_rank("cp") == 0,
    )
