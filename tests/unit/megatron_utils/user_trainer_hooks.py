"""Functions that a user would write around the trainer's passes. They record their calls."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

CALLS: list[tuple[Any, ...]] = []


def after_init(args: Namespace) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    CALLS.append(("init", args.lr, dist.is_initialized(), mpu.get_data_parallel_world_size()))


def before_log_prob(args: Namespace, model: list[Any], store_prefix: str) -> None:
    CALLS.append(("log_prob", args.lr, len(model), store_prefix))


def before_step(
    args: Namespace, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any
) -> None:
    largest = max(float(buffer.grad_data.abs().max()) for chunk in model for buffer in chunk.buffers)
    CALLS.append(("step", rollout_id, step_id, largest))


def freeze_first_step(
    args: Namespace, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if step_id == 0 else args.lr
