"""Megatron's optimizer and learning-rate schedule. Steps of the schedule are counted in samples, as Megatron does."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils.arguments import OptimizerArgs

__all__ = ["build_optimizer", "build_scheduler"]


def build_optimizer(args: OptimizerArgs, model: torch.nn.Module, dtype: torch.dtype) -> Any:
    """Adam (AdamW) or SGD over float32 main parameters, states sharded over the data-parallel ranks."""
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def build_scheduler(
    args: OptimizerArgs, optimizer: Any, *, num_steps: int, global_batch_size: int
) -> OptimizerParamScheduler:
    """The schedule over ``num_steps`` optimizer steps.

    Always needed: without it, the exemption of norms from weight decay has no effect.
    """
    decay = (args.lr_decay_iters or max(1, num_steps)) * global_batch_size
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay)
    else:
        warmup = args.lr_warmup_iters * global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=min(warmup, decay - 1),
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
    )
