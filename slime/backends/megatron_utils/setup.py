"""Starts a trainer process: process groups, seeds, model, optimizer. Called by ``actor`` once.

Must not be imported before ``patches.install.install`` ran: everything here imports megatron.core.
"""

from __future__ import annotations

import random
from argparse import Namespace

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from slime.backends.megatron_utils.arguments import (
    ModelArgs,
    OptimizerArgs,
    ParallelArgs,
    PrecisionArgs,
    TrainerArgs,
)
from slime.backends.megatron_utils.model import build_config, build_model, wrap_data_parallel
from slime.backends.megatron_utils.model_shape import ModelShape
from slime.backends.megatron_utils.optimizer import build_optimizer, build_scheduler
from slime.backends.megatron_utils.step import TrainState
from slime.config.groups import from_args
from slime.utils import accelerator
from slime.utils.distributed_utils import init_default_group

__all__ = ["build_train_state", "init_distributed"]


def init_distributed(parallel: ParallelArgs, trainer: TrainerArgs) -> None:
    """The default group, Megatron's groups, and the seeds. Waits at most --distributed-timeout-minutes."""
    backend = parallel.distributed_backend or accelerator.current().communication_backend
    init_default_group(backend, timeout_s=parallel.distributed_timeout_minutes * 60)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, round(parallel.distributed_timeout_minutes)),
            create_gloo_process_groups=False,
        )
    seed = trainer.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if trainer.deterministic_mode:
        torch.use_deterministic_algorithms(True)


def build_train_state(args: Namespace, shape: ModelShape) -> TrainState:
    """Model, optimizer and schedule, without weights."""
    model_args = from_args(ModelArgs, args)
    precision = from_args(PrecisionArgs, args)
    optimizer_args = from_args(OptimizerArgs, args)
    parallel = from_args(ParallelArgs, args)
    config = build_config(
        shape,
        model_args,
        parallel,
        precision,
        from_args(TrainerArgs, args),
        per_token_loss=args.calculate_per_token_loss,
    )
    multiple = model_args.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
    model = build_model(shape, config, padded_vocab_size=shape.padded_vocab_size(multiple))
    wrapped = wrap_data_parallel(config, model, precision, optimizer_args)
    optimizer = build_optimizer(wrapped, optimizer_args, precision)
    samples = (args.num_rollout or 0) * args.rollout_batch_size * args.n_samples_per_prompt
    scheduler = build_scheduler(
        optimizer,
        optimizer_args,
        num_steps=samples // args.global_batch_size,
        global_batch_size=args.global_batch_size,
    )
    return TrainState(wrapped, config, optimizer, scheduler, shape.vocab_size)
