"""Megatron's process groups: made with the seeds, destroyed, and the place of this rank in them.

Must not be imported before ``patches.install`` ran.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from slime.backends.megatron_utils.precision import token_multiple
from slime.backends.training.arguments import ParallelArgs, TrainerArgs
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.data import RankPlace, row_multiple
from slime.batch.arguments import BatchArgs
from slime.utils import accelerator
from slime.utils.distributed_utils import destroy_default_group, init_default_group


def init_distributed(parallel: ParallelArgs, trainer: TrainerArgs, *, num_optimizer_instances: int = 1) -> None:
    """Make the default group, Megatron's groups, and the seeds. Waits at most --distributed-timeout-minutes.

    Args:
        num_optimizer_instances: groups of data-parallel ranks that hold all optimizer states each.
    """
    backend = parallel.distributed_backend or accelerator.current().communication_backend
    init_default_group(backend, timeout_s=parallel.distributed_timeout_minutes * 60)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=num_optimizer_instances,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            # With the flag, the pipeline stages of a replica are closer than its data-parallel peers.
            order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            distributed_timeout_minutes=max(1, round(parallel.distributed_timeout_minutes)),
            create_gloo_process_groups=False,
        )
    # the first stage's parameters that no checkpoint holds must not repeat in the next
    seed = trainer.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if trainer.deterministic_mode:
        torch.use_deterministic_algorithms(True)


def destroy_distributed() -> None:
    """Undo :func:`init_distributed`, threads included, as far as no caller holds a group. A collective."""
    mpu.destroy_model_parallel()
    mpu._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # destroy_model_parallel() of 0.16 keeps it
    destroy_default_group()


def rank_place() -> RankPlace:
    """This rank's place among those that share a batch."""
    is_last_stage = mpu.is_pipeline_last_stage(ignore_virtual=True)
    has_loss = bool(is_last_stage and mpu.get_tensor_model_parallel_rank() == 0)
    return RankPlace(
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        dp_group=mpu.get_data_parallel_group(with_context_parallel=False),
        cp_size=mpu.get_context_parallel_world_size(),
        is_main=has_loss and mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
        keeps_batch=has_loss and mpu.get_context_parallel_rank() == 0,
        tensor_group=tensor_group(),
    )


def tensor_group() -> dist.ProcessGroup | None:
    """The ranks that share the vocabulary. None for one rank, which needs no collectives."""
    return mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None


def sharding_of(config: Any, settings: BatchArgs) -> Sharding:
    """How the samples of a data-parallel rank are divided among the ranks that share them."""
    tensor_ranks = mpu.get_tensor_model_parallel_world_size()
    slices = tensor_ranks if config.sequence_parallel else 1
    size = mpu.get_context_parallel_world_size()
    return Sharding(
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=size,
        cp_group=mpu.get_context_parallel_group() if size > 1 else None,
        sequence_multiple=math.lcm(token_multiple(config) * slices, row_multiple(settings) * tensor_ranks),
    )
