"""Passes through the sharded model and its optimizer steps, and the optimizer. Called by ``actor``.

FSDP averages gradients over all ranks in every backward pass. The loss is divided so that the result is the gradient
described in ``training.loss``, the same as with the other backends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.model import PACKED, local_tensor
from slime.backends.training.arguments import OptimizerArgs
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.data import MicroBatch, RankPlace, TrainBatch
from slime.backends.training.loss import LossContext, micro_batch_loss
from slime.backends.training.optimizer import ScheduledRates, StatelessAdam, fuse_adamw
from slime.backends.training.steps import (
    ReadOutput,
    StepRecord,
    StepResult,
    finish_step,
    num_trained_tokens,
    split_by_sample,
)


@dataclass(frozen=True)
class TrainState:
    """The live model, its optimizer and schedule.

    Attributes:
        model: sharded over all ranks.
        sharding: how the samples of a data-parallel rank are divided among the ranks that share them.
        clip_grad: largest gradient norm. 0 means no limit.
        adapter: settings of the adapters and their base, for checkpoints. None: all weights are trained.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    rates: ScheduledRates
    sharding: Sharding
    clip_grad: float
    adapter: Mapping[str, Any] | None = None


def run_model(model: PreTrainedModel, micro_batch: MicroBatch) -> torch.Tensor:
    """Logits ``[n, V]`` of the rows that predict response tokens, or fp32 ``[1, T, V]`` of all rows if the micro-batch
    asks for them."""
    packed, rows = micro_batch.packed, micro_batch.head_rows
    attention: dict[str, Any] = {}
    if model.config._attn_implementation == PACKED:
        attention = {
            "attention_plan": micro_batch.plan,
            "cp_group": micro_batch.sharding.cp_group,
            # layers that are recomputed keep nothing
            "picks_again": packed.shared is not None and not model.is_gradient_checkpointing,
        }
    logits: torch.Tensor = model(
        input_ids=packed.tokens,
        position_ids=packed.position_ids,  # they also tell transformers' own attention where samples begin
        use_cache=False,
        logits_to_keep=0 if rows is None else rows,  # 0: all rows
        **attention,
    ).logits
    return logits.float() if rows is None else logits.squeeze(0)


@torch.no_grad()
def outputs_by_sample(model: PreTrainedModel, batch: TrainBatch, read: ReadOutput) -> list[torch.Tensor]:
    """``read``'s values of the model's outputs: fp32 ``[R_i, ...]`` per sample, in the batch's order, on the cpu."""
    results: dict[int, torch.Tensor] = {}
    model.eval()
    for step in range(batch.num_steps):
        for micro_batch in batch.micro_batches(step):
            values = read(micro_batch, run_model(model, micro_batch))
            results |= split_by_sample(values, micro_batch.indices, micro_batch.response_lengths)
    model.train()
    return [results[index] for index in range(batch.num_samples)]


def train_step(state: TrainState, context: LossContext, step: int) -> StepResult:
    """Train on step ``step`` of the batch.

    Raises:
        NonFiniteGradients: on all ranks, before anything was applied.
    """
    batch, place, num_rollouts = context.batch, context.place, context.num_rollouts
    per_token = context.settings.calculate_per_token_loss
    share = _share(batch, step, place, per_token=per_token)
    record = StepRecord()
    state.model.train()
    state.optimizer.zero_grad(set_to_none=True)
    # Every layer is gathered from all ranks, which must therefore run the same number of micro-batches.
    for micro_batch in batch.micro_batches(step, all_rows=context.objective.needs_all_rows):
        loss = micro_batch_loss(run_model(state.model, micro_batch), micro_batch, context)
        record.add(micro_batch, loss)
        torch.autograd.backward(loss.loss * share)
    metrics = record.metrics(per_token=per_token, num_rollouts=num_rollouts, group=place.dp_group)
    gradients = [local_tensor(one.grad) for one in state.model.parameters() if one.grad is not None]
    norm = _norm(gradients)
    is_bad = not math.isfinite(norm)  # equal on all ranks, which therefore decide alike

    def update() -> tuple[float, str | None]:
        if is_bad:
            return math.nan, f"gradients are NaN or infinite ({record.describe_bad(batch, place.dp_rank)})"
        factor = state.clip_grad / (norm + 1e-6) if state.clip_grad > 0 else 1.0
        if factor < 1:
            torch._foreach_mul_(gradients, factor)  # they are views of the parameters' gradients
        state.optimizer.step()
        state.rates.advance(num_rollouts)
        return norm, None

    groups = state.optimizer.param_groups
    return finish_step(context, step, record, metrics, param_groups=groups, is_bad=is_bad, update=update)


def _share(batch: TrainBatch, step: int, place: RankPlace, *, per_token: bool) -> float:
    """Factor of a micro-batch's loss that makes the mean over ranks the gradient of ``training.loss``."""
    if not per_token:
        return 1.0 / batch.num_micro_batches(step)
    return place.dp_size / max(1, num_trained_tokens(batch, step, place.dp_group))


def _norm(gradients: list[torch.Tensor]) -> float:
    """L2 norm over all ranks' shards. It is not finite if one of them is not."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total = torch.stack(norms).double().square().sum()
    dist.all_reduce(total)  # the shards of all ranks are disjoint, so each number counts once
    return float(total.sqrt())


def build_optimizer(
    model: PreTrainedModel, settings: OptimizerArgs, *, is_stateless: bool = False
) -> torch.optim.Optimizer:
    """AdamW or SGD on the shards. Its states are sharded like the weights. Norms and biases are not decayed.

    Args:
        is_stateless: Adam without moments (--use-stateless-adam).
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    plain = [one for name, one in trained if name.endswith(".bias") or one.dim() == 1]
    decayed = [one for name, one in trained if not (name.endswith(".bias") or one.dim() == 1)]
    groups = [{"params": decayed, "decay_factor": 1.0}, {"params": plain, "decay_factor": 0.0}]
    groups = [group for group in groups if group["params"]]
    betas = (settings.adam_beta1, settings.adam_beta2)
    if is_stateless:
        return StatelessAdam(groups, settings.lr, betas, settings.adam_eps, settings.weight_decay)
    match settings.optimizer:
        case "adam":
            adamw = torch.optim.AdamW(groups, settings.lr, betas, settings.adam_eps, settings.weight_decay)
            fuse_adamw(adamw)
            return adamw
        case "sgd":
            return torch.optim.SGD(groups, settings.lr, settings.sgd_momentum, weight_decay=settings.weight_decay)
        case other:
            raise ValueError(f"--optimizer {other} is not supported")


@torch.no_grad()
def allocate_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states of an optimizer before its first step, as the target of loading a checkpoint."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state or isinstance(optimizer, StatelessAdam):
                continue
            match optimizer:
                case torch.optim.AdamW():
                    state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, as AdamW itself makes it
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                case torch.optim.SGD() if group["momentum"] != 0:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


@torch.no_grad()
def reset_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero Adam's moments and step counts, and the momentum of sgd (--reset-optimizer-states)."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
