"""One optimizer step: forward and backward over its micro-batches, validity, update, metrics. Called by ``actor``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.megatron_utils.cp_utils import Sharding
from slime.backends.megatron_utils.custom import CustomFunctions
from slime.backends.megatron_utils.data import MicroBatch, TrainBatch
from slime.backends.megatron_utils.forward import run_model, run_schedule, split_by_sample, tensor_group
from slime.backends.megatron_utils.loss import LossScale, micro_batch_loss, needs_all_rows

__all__ = ["NonFiniteGradients", "StepResult", "TrainState", "train_step"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """The live model, its Megatron config, optimizer and schedule.

    Attributes:
        chunks: this rank's part of the model, data-parallel wrapped: one, or one per virtual pipeline stage.
        sharding: how the samples of a data-parallel rank are divided among the ranks that share them.
        trains_prediction: multi-token-prediction layers learn as well.
    """

    chunks: list[Any]
    config: Any
    optimizer: Any
    scheduler: Any
    vocab_size: int
    sharding: Sharding = field(default_factory=Sharding)
    trains_prediction: bool = False

    @property
    def model(self) -> Any:
        """The only chunk, or the list of them: what checkpoints and conversion take."""
        return self.chunks[0] if len(self.chunks) == 1 else self.chunks


@dataclass(frozen=True)
class StepResult:
    """What one step tells.

    Attributes:
        metrics: equal on all ranks of the last pipeline stage; the others only know norm, rates and batch size.
        log_probs: what the step saw before the update, by position in the rank's batch; last pipeline stage only.
    """

    metrics: dict[str, float]
    log_probs: dict[int, torch.Tensor] = field(repr=False)


class NonFiniteGradients(RuntimeError):
    """Gradients hold NaN or infinity on ``ranks`` (data-parallel ranks); nothing was applied."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"gradients are not finite on data-parallel ranks {ranks}")
        self.ranks = ranks


def train_step(
    state: TrainState,
    batch: TrainBatch,
    step: int,
    settings: AlgorithmArgs,
    *,
    temperature: float,
    skip_bad: bool,
    custom: CustomFunctions | None = None,
    is_critic: bool = False,
    before: Callable[[], None] | None = None,
) -> StepResult:
    """Train on step ``step`` of the batch.

    Args:
        skip_bad: skip the update when gradients are not finite, instead of raising.
        custom: the user's functions inside the objective.
        is_critic: the model has a value head and is trained on the value loss.
        before: called once the gradients are zero.

    Raises:
        NonFiniteGradients: on all ranks, before anything was applied.
    """
    scale = _loss_scale(batch, step)
    reported: list[tuple[list[str], torch.Tensor]] = []
    log_probs: dict[int, torch.Tensor] = {}
    predicted: list[torch.Tensor] = []

    def loss_function(
        micro_batch: MicroBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss = micro_batch_loss(
            logits,
            micro_batch,
            batch,
            settings,
            scale,
            vocab_size=state.vocab_size,
            temperature=temperature,
            custom=custom,
            is_critic=is_critic,
        )
        reported.append((loss.names, loss.values))
        predicted.extend(micro_batch.segments.prediction_losses)
        if loss.log_probs is not None:
            log_probs.update(split_by_sample(loss.log_probs, micro_batch))
        return loss.loss, loss.num_tokens, {}

    def forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        return run_model(model, micro_batch), partial(loss_function, micro_batch)

    _zero_gradients(state)
    if before is not None:
        before()
    bad_ranks: list[int] = []
    state.config.finalize_model_grads_func = partial(_finalize, state.chunks, bad_ranks)
    all_rows = needs_all_rows(settings)
    vocab = state.vocab_size if state.trains_prediction else None
    run_schedule(forward_step, state.chunks, batch, step, all_rows=all_rows, prediction_vocab=vocab, forward_only=False)
    metrics = _metrics(state, reported, predicted, settings.calculate_per_token_loss, scale.num_rollouts)
    rates = {f"lr-pg_{i}": float(group["lr"]) for i, group in enumerate(state.optimizer.param_groups)}
    metrics["grad_norm"] = _update(state, bad_ranks, scale.num_rollouts, skip_bad)
    metrics |= rates | {"global_batch_size": float(scale.num_rollouts)}
    return StepResult(metrics, log_probs)


def _metrics(
    state: TrainState,
    reported: list[tuple[list[str], torch.Tensor]],
    predicted: list[torch.Tensor],
    per_token: bool,
    num_rollouts: int,
) -> dict[str, float]:
    """What the losses report; nothing on other pipeline stages than the last, which do not see them."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    metrics = _reduce_metrics(reported, per_token, num_rollouts)
    if state.trains_prediction:
        metrics["mtp_loss"] = _mean_prediction_loss(predicted)
    return metrics


def _zero_gradients(state: TrainState) -> None:
    for chunk in state.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    state.config.grad_scale_func = state.optimizer.scale_loss


def _loss_scale(batch: TrainBatch, step: int) -> LossScale:
    return LossScale(
        batch.num_micro_batches(step),
        batch.num_rollouts(step),
        mpu.get_data_parallel_world_size(),
        context_parallel_size=mpu.get_context_parallel_world_size(),
        tensor_group=tensor_group(),
    )


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


def _finalize(
    wrapped: list[Any], bad_ranks: list[int], model: Any, num_tokens: torch.Tensor | None, **kwargs: Any
) -> None:
    """Megatron's gradient reduction, after every rank has learnt whose gradients are not finite.

    The ranks of a data-parallel rank hold parts of one model: one of them with bad gradients makes it a bad rank.
    """
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    sums = [buffer.grad_data.sum(dtype=torch.float32) for buffer in buffers]
    is_bad = torch.zeros(mpu.get_data_parallel_world_size(), dtype=torch.int32, device=sums[0].device)
    is_bad[mpu.get_data_parallel_rank()] = (~torch.isfinite(torch.stack(sums))).any()
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    bad_ranks.extend(is_bad.nonzero().flatten().tolist())
    finalize_model_grads(model, num_tokens, **kwargs)


def _mean_prediction_loss(predicted: list[torch.Tensor]) -> float:
    """Per trained token, over all depths, micro-batches and ranks; each rank counts its own tokens."""
    total = torch.stack(predicted).sum(0)
    dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    loss, tokens = total.tolist()
    return loss / max(tokens, 1.0)


def _reduce_metrics(
    reported: list[tuple[list[str], torch.Tensor]], per_token: bool, num_rollouts: int
) -> dict[str, float]:
    """Sum over micro-batches and ranks, divided by the step's trained tokens or rollouts.

    Tensor- and context-parallel ranks compute the same values, so only data-parallel ranks are summed.
    """
    values = torch.stack([values for _, values in reported]).sum(0)
    dist.all_reduce(values, group=mpu.get_data_parallel_group())
    tokens, *sums = values.tolist()
    divisor = max(tokens, 1.0) if per_token else num_rollouts
    return {name: total / divisor for name, total in zip(reported[0][0], sums, strict=True)}
