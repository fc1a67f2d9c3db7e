"""One optimizer step: forward and backward over its micro-batches, validity, update, metrics. Called by ``actor``.

FSDP averages gradients over all ranks in every backward pass; the loss is divided so that what comes out is the
gradient described in ``training.loss``, the same as with the other backends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.fsdp_utils.forward import run_model
from slime.backends.fsdp_utils.model import local_tensor
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.custom import CustomFunctions
from slime.backends.training.data import TrainBatch
from slime.backends.training.loss import LossScale, micro_batch_loss, needs_all_rows
from slime.backends.training.place import RankPlace
from slime.backends.training.schedule import ScheduledRates
from slime.backends.training.steps import (
    TEACHES_NOTHING,
    NonFiniteGradients,
    StepRecord,
    StepResult,
    num_trained_tokens,
    teaches_nothing,
)

__all__ = ["TrainState", "train_step"]


@dataclass(frozen=True)
class TrainState:
    """The live model, its optimizer and schedule.

    Attributes:
        model: sharded over all ranks.
        sharding: how the samples of a data-parallel rank are divided among the ranks that share them.
        clip_grad: largest gradient norm; 0 means no limit.
        recomputes_loss: the backward pass computes the loss again.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    rates: ScheduledRates
    sharding: Sharding
    place: RankPlace
    vocab_size: int
    clip_grad: float
    recomputes_loss: bool = False


def train_step(
    state: TrainState,
    batch: TrainBatch,
    step: int,
    settings: AlgorithmArgs,
    *,
    temperature: float,
    skip_bad: bool,
    custom: CustomFunctions,
) -> StepResult:
    """Train on step ``step`` of the batch.

    Args:
        skip_bad: skip the update when gradients are not finite, instead of raising.
        custom: the user's functions inside the objective.

    Raises:
        NonFiniteGradients: on all ranks, before anything was applied.
    """
    place = state.place
    scale = LossScale(
        batch.num_micro_batches(step),
        batch.num_rollouts(step),
        place.dp_size,
        context_parallel_size=place.cp_size,
    )
    share = _share(state, batch, step, settings)
    record = StepRecord()
    state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    for micro_batch in batch.micro_batches(step, all_rows=needs_all_rows(settings)):
        loss = micro_batch_loss(
            run_model(state.model, micro_batch),
            micro_batch,
            batch,
            settings,
            scale,
            vocab_size=state.vocab_size,
            temperature=temperature,
            custom=custom,
            recompute=state.recomputes_loss,
        )
        record.add(micro_batch, loss)
        torch.autograd.backward(loss.loss * share)
    metrics = record.metrics(
        per_token=settings.calculate_per_token_loss, num_rollouts=scale.num_rollouts, group=place.dp_group
    )
    metrics |= {f"lr-pg_{i}": float(group["lr"]) for i, group in enumerate(state.optimizer.param_groups)}
    gradients = _gradients(state.model)
    metrics["grad_norm"] = _norm(gradients)
    metrics["global_batch_size"] = float(scale.num_rollouts)
    if not math.isfinite(metrics["grad_norm"]):
        reason = f"gradients are NaN or infinite ({record.blame(batch, place.dp_rank)})"
        if not skip_bad:
            raise NonFiniteGradients(reason)
        return StepResult(metrics | {"grad_norm": math.nan}, record.log_probs, reason)
    if teaches_nothing(batch, step, settings, place.dp_group):
        return StepResult(metrics, record.log_probs, TEACHES_NOTHING)
    _update(state, gradients, metrics["grad_norm"], scale.num_rollouts)
    return StepResult(metrics, record.log_probs)


def _share(state: TrainState, batch: TrainBatch, step: int, settings: AlgorithmArgs) -> float:
    """What a micro-batch's loss is multiplied by, so that the mean over ranks is the gradient of ``training.loss``."""
    if not settings.calculate_per_token_loss:
        return 1.0 / batch.num_micro_batches(step)
    return state.place.dp_size / max(1, num_trained_tokens(batch, step, state.place.dp_group))


def _gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    return [local_tensor(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def _norm(gradients: list[torch.Tensor]) -> float:
    """L2 norm over all ranks' shards; not finite where one of them is not."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total = torch.stack(norms).double().square().sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def _update(state: TrainState, gradients: list[torch.Tensor], norm: float, num_rollouts: int) -> None:
    factor = state.clip_grad / (norm + 1e-6) if state.clip_grad > 0 else 1.0
    if factor < 1:
        torch._foreach_mul_(gradients, factor)
    state.optimizer.step()
    state.rates.advance(num_rollouts)
