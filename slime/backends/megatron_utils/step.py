"""One optimizer step: forward and backward over its micro-batches, validity, update, metrics. Called by ``actor``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.megatron_utils.data import MicroBatch, TrainBatch
from slime.backends.megatron_utils.forward import run_model, split_by_sample
from slime.backends.megatron_utils.loss import LossScale, micro_batch_loss

__all__ = ["NonFiniteGradients", "StepResult", "TrainState", "train_step"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """The live model (data-parallel wrapped), its Megatron config, optimizer and schedule."""

    model: Any
    config: Any
    optimizer: Any
    scheduler: Any
    vocab_size: int


@dataclass(frozen=True)
class StepResult:
    """What one step tells: its metrics, equal on all ranks, and the log-probs it saw before the update."""

    metrics: dict[str, float]
    log_probs: dict[int, torch.Tensor] = field(repr=False)


class NonFiniteGradients(RuntimeError):
    """Gradients hold NaN or infinity on ``ranks`` (data-parallel ranks); nothing was applied."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"gradients are not finite on data-parallel ranks {ranks}")
        self.ranks = ranks


def train_step(
    state: TrainState, batch: TrainBatch, step: int, settings: AlgorithmArgs, *, temperature: float, skip_bad: bool
) -> StepResult:
    """Train on step ``step`` of the batch.

    Args:
        skip_bad: skip the update when gradients are not finite, instead of raising.

    Raises:
        NonFiniteGradients: on all ranks, before anything was applied.
    """
    scale = LossScale(batch.num_micro_batches(step), batch.num_rollouts(step), mpu.get_data_parallel_world_size())
    reported: list[tuple[list[str], torch.Tensor]] = []
    log_probs: dict[int, torch.Tensor] = {}

    def loss_function(
        micro_batch: MicroBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss = micro_batch_loss(
            logits, micro_batch, batch, settings, scale, vocab_size=state.vocab_size, temperature=temperature
        )
        reported.append((loss.names, loss.values))
        log_probs.update(split_by_sample(loss.log_probs, micro_batch))
        return loss.loss, loss.num_tokens, {}

    def forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        return run_model(model, micro_batch), partial(loss_function, micro_batch)

    state.model.train()
    state.model.zero_grad_buffer()
    state.optimizer.zero_grad()
    state.config.grad_scale_func = state.optimizer.scale_loss
    bad_ranks: list[int] = []
    state.config.finalize_model_grads_func = partial(_finalize, state.model, bad_ranks)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batch.micro_batches(step),
        model=state.model,
        num_microbatches=scale.num_micro_batches,
        seq_length=0,  # lengths vary; not read without pipeline parallelism
        micro_batch_size=1,
        forward_only=False,
    )
    metrics = _reduce_metrics(reported, settings.calculate_per_token_loss, scale.num_rollouts)
    rates = {f"lr-pg_{i}": float(group["lr"]) for i, group in enumerate(state.optimizer.param_groups)}
    metrics["grad_norm"] = _update(state, bad_ranks, scale.num_rollouts, skip_bad)
    metrics |= rates
    metrics["global_batch_size"] = float(scale.num_rollouts)
    return StepResult(metrics, log_probs)


def _update(state: TrainState, bad_ranks: list[int], num_rollouts: int, skip_bad: bool) -> float:
    """Apply the gradients. Returns their norm before clipping, nan when the step was skipped."""
    has_dynamic_scale = bool(state.config.fp16)  # its optimizer skips overflows by itself and lowers the scale
    if bad_ranks and not has_dynamic_scale:
        if not skip_bad:
            raise NonFiniteGradients(bad_ranks)
        logger.warning("step skipped: gradients are not finite on data-parallel ranks %s", bad_ranks)
        return math.nan
    is_applied, grad_norm, _ = state.optimizer.step()
    if not is_applied:
        logger.warning("step skipped: fp16 gradients overflowed; the loss scale is lowered")
        return math.nan
    state.scheduler.step(increment=num_rollouts)
    return float(grad_norm)


def _finalize(wrapped: Any, bad_ranks: list[int], model: Any, num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
    """Megatron's gradient reduction, after every rank has learnt whose gradients are not finite."""
    sums = [buffer.grad_data.sum(dtype=torch.float32) for buffer in wrapped.buffers]
    is_finite = torch.isfinite(torch.stack(sums)).all().float()
    group = mpu.get_data_parallel_group()
    flags = [torch.empty_like(is_finite) for _ in range(group.size())]
    dist.all_gather(flags, is_finite, group=group)
    bad_ranks.extend(rank for rank, flag in enumerate(flags) if not flag)
    finalize_model_grads(model, num_tokens, **kwargs)


def _reduce_metrics(
    reported: list[tuple[list[str], torch.Tensor]], per_token: bool, num_rollouts: int
) -> dict[str, float]:
    """Sum over micro-batches and ranks, divided by the step's trained tokens or rollouts."""
    values = torch.stack([values for _, values in reported]).sum(0)
    dist.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))
    tokens, *sums = values.tolist()
    divisor = max(tokens, 1.0) if per_token else num_rollouts
    return {name: total / divisor for name, total in zip(reported[0][0], sums, strict=True)}
