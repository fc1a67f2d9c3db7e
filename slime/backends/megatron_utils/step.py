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
from slime.backends.megatron_utils.forward import run_model, run_schedule, tensor_group
from slime.backends.megatron_utils.model.attention import PackedSegments, segments_of
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.custom import CustomFunctions
from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.loss import LossScale, micro_batch_loss, needs_all_rows
from slime.backends.training.steps import (
    TEACHES_NOTHING,
    NonFiniteGradients,
    StepRecord,
    StepResult,
    teaches_nothing,
)
from slime.utils import accelerator

__all__ = ["TrainState", "train_step"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """The live model, its Megatron config, optimizer and schedule.

    Attributes:
        chunks: this rank's part of the model, data-parallel wrapped: one, or one per virtual pipeline stage.
        sharding: how the samples of a data-parallel rank are divided among the ranks that share them.
        trains_prediction: multi-token-prediction layers learn as well.
        recomputes_loss: the backward pass computes the loss again.
    """

    chunks: list[Any]
    config: Any
    optimizer: Any
    scheduler: Any
    vocab_size: int
    sharding: Sharding = field(default_factory=Sharding)
    trains_prediction: bool = False
    recomputes_loss: bool = False

    @property
    def model(self) -> Any:
        """The only chunk, or the list of them: what checkpoints and conversion take."""
        return self.chunks[0] if len(self.chunks) == 1 else self.chunks


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
    record = StepRecord()
    predicted: list[torch.Tensor] = []
    vocab = state.vocab_size if state.trains_prediction else None

    def loss_function(
        micro_batch: MicroBatch, segments: PackedSegments, logits: torch.Tensor
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
            packing=segments,
            recompute=state.recomputes_loss,
        )
        record.add(micro_batch, loss)
        predicted.extend(segments.prediction_losses)
        return loss.loss, loss.num_tokens, {}

    def forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        segments = segments_of(micro_batch, prediction_vocab=vocab)
        return run_model(model, micro_batch, segments), partial(loss_function, micro_batch, segments)

    _zero_gradients(state)
    if before is not None:
        before()
    bad_ranks: list[int] = []
    state.config.finalize_model_grads_func = partial(_finalize, state.chunks, bad_ranks)
    rows = {"all_rows": needs_all_rows(settings), "with_trained": state.trains_prediction}
    run_schedule(forward_step, state.chunks, batch, step, forward_only=False, **rows)
    metrics = _metrics(state, record, predicted, settings.calculate_per_token_loss, scale.num_rollouts)
    rates = {f"lr-pg_{i}": float(group["lr"]) for i, group in enumerate(state.optimizer.param_groups)}
    if not bad_ranks and teaches_nothing(batch, step, settings, mpu.get_data_parallel_group()):
        metrics["grad_norm"], skipped = 0.0, TEACHES_NOTHING
    else:
        who = partial(record.blame, batch, mpu.get_data_parallel_rank())
        metrics["grad_norm"], skipped = _update(state, bad_ranks, scale.num_rollouts, who)
        if skipped and not skip_bad:
            raise NonFiniteGradients(skipped)
    metrics |= rates | {"global_batch_size": float(scale.num_rollouts)}
    return StepResult(metrics, record.log_probs, skipped)


def _metrics(
    state: TrainState,
    record: StepRecord,
    predicted: list[torch.Tensor],
    per_token: bool,
    num_rollouts: int,
) -> dict[str, float]:
    """What the losses report; nothing on other pipeline stages than the last, which do not see them."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    metrics = record.metrics(per_token=per_token, num_rollouts=num_rollouts, group=mpu.get_data_parallel_group())
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


def _update(
    state: TrainState, bad_ranks: list[int], num_rollouts: int, who: Callable[[], str]
) -> tuple[float, str | None]:
    """Apply the gradients. Returns their norm before clipping, or nan and what ``StepResult.skipped`` says."""
    has_dynamic_scale = bool(state.config.fp16)  # its optimizer skips overflows by itself and lowers the scale
    if bad_ranks and not has_dynamic_scale:
        return math.nan, f"gradients are NaN or infinite on data-parallel ranks {bad_ranks} ({who()})"
    is_applied, grad_norm, _ = state.optimizer.step()
    if not is_applied:
        logger.warning("step skipped: fp16 gradients overflowed; the loss scale is lowered")
        return math.nan, ""
    state.scheduler.step(increment=num_rollouts)
    return float(grad_norm), None


def _finalize(
    wrapped: list[Any], bad_ranks: list[int], model: Any, num_tokens: torch.Tensor | None, **kwargs: Any
) -> None:
    """Megatron's gradient reduction, after every rank has learnt whose gradients are not finite.

    The ranks of a data-parallel rank hold parts of one model: one of them with bad gradients makes it a bad rank.
    """
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    sums = [buffer.grad_data.sum(dtype=torch.float32) for buffer in buffers]  # none where all weights are frozen
    device = accelerator.current().device()
    is_bad = torch.zeros(mpu.get_data_parallel_world_size(), dtype=torch.int32, device=device)
    if sums:
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
