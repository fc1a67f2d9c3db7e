"""Passes through the model and optimizer steps, on Megatron's schedules. Called by ``actor``.

With pipeline parallelism the last stage has the outputs. :func:`from_last_stage` gives them to the others, so that
every rank holds the same columns.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from slime.backends.megatron_utils.checkpoint.state import TrainState
from slime.backends.megatron_utils.model.attention import PackedSegments, segments_of
from slime.backends.megatron_utils.model.gpt import unwrap
from slime.backends.training.arguments import PluginArgs
from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.loss import LossContext, micro_batch_loss
from slime.backends.training.steps import ReadOutput, StepRecord, StepResult, finish_step, split_by_sample
from slime.config.groups import RunConfig
from slime.hooks import load_optional
from slime.utils import accelerator

logger = logging.getLogger(__name__)


def train_step(
    state: TrainState, context: LossContext, step: int, *, before: Callable[[], None] | None = None
) -> StepResult:
    """Train on step ``step`` of the batch.

    Args:
        before: called once the gradients are zero.

    Raises:
        NonFiniteGradients: on all ranks, before anything was applied.
    """
    batch, objective, num_rollouts = context.batch, context.objective, context.num_rollouts
    record = StepRecord()
    predicted: list[torch.Tensor] = []
    vocab = objective.vocab_size if state.trains_prediction else None

    def loss_function(
        micro_batch: MicroBatch, segments: PackedSegments, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss = micro_batch_loss(logits, micro_batch, context, packing=segments)
        record.add(micro_batch, loss)
        predicted.extend(segments.prediction_losses)
        return loss.loss, loss.num_tokens, {}

    def forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        segments = segments_of(micro_batch, prediction_vocab=vocab)
        return run_model(model, micro_batch, segments), partial(loss_function, micro_batch, segments)

    _zero_gradients(state)
    # Megatron moves them with the reduction of the gradients, before it is known whether the step is applied
    biases = [one for chunk in state.chunks for name, one in chunk.named_buffers() if name.endswith("expert_bias")]
    unmoved = [one.clone() for one in biases]
    if before is not None:
        before()
    bad_ranks: list[int] = []
    state.config.finalize_model_grads_func = partial(_finalize, state.chunks, bad_ranks)
    run_schedule(
        forward_step,
        state.chunks,
        batch,
        step,
        forward_only=False,
        all_rows=objective.needs_all_rows,
        with_trained=state.trains_prediction,
    )
    metrics = _metrics(state, record, predicted, context)
    describe = partial(record.describe_bad, batch, context.place.dp_rank)
    result = finish_step(
        context,
        step,
        record,
        metrics,
        param_groups=state.optimizer.param_groups,
        is_bad=bool(bad_ranks),
        update=partial(_update, state, bad_ranks, num_rollouts, describe),
    )
    if result.skipped is not None:
        for bias, old in zip(biases, unmoved, strict=True):
            bias.copy_(old)
    if step + 1 == batch.num_steps:
        for chunk in state.chunks:
            if chunk.use_forward_hook:  # --overlap-param-gather: a weight sync may come before the next forward pass
                chunk.start_param_sync(force_sync=True)
    return result


def _metrics(
    state: TrainState, record: StepRecord, predicted: list[torch.Tensor], context: LossContext
) -> dict[str, float]:
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    metrics = record.metrics(
        per_token=context.settings.calculate_per_token_loss,
        num_rollouts=context.num_rollouts,
        group=mpu.get_data_parallel_group(),
    )
    if state.trains_prediction:
        metrics["mtp_loss"] = _mean_prediction_loss(predicted)
    return metrics


def _zero_gradients(state: TrainState) -> None:
    for chunk in state.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    state.config.grad_scale_func = state.optimizer.scale_loss  # the loss scale of fp16


def _update(
    state: TrainState, bad_ranks: list[int], num_rollouts: int, describe: Callable[[], str]
) -> tuple[float, str | None]:
    """Apply the gradients. Returns their norm before clipping, or nan and the reason for ``StepResult.skipped``."""
    has_dynamic_scale = bool(state.config.fp16)  # its optimizer skips overflows by itself and lowers the scale
    if bad_ranks and not has_dynamic_scale:
        return math.nan, f"gradients are NaN or infinite on data-parallel ranks {bad_ranks} ({describe()})"
    is_applied, grad_norm, _ = state.optimizer.step()
    if not is_applied:
        logger.warning("step skipped: fp16 gradients overflowed; the loss scale is lowered")
        return math.nan, ""
    state.scheduler.step(increment=num_rollouts)
    return float(grad_norm), None


def _finalize(
    wrapped: list[Any], bad_ranks: list[int], model: Any, num_tokens: torch.Tensor | None, **kwargs: Any
) -> None:
    """Megatron's gradient reduction. Afterwards every rank knows whose gradients were not finite before it."""
    finalize_model_grads(model, num_tokens, **kwargs)
    sums = [one for chunk in wrapped for one in chunk.local_sums]  # none where all weights are frozen
    for chunk in wrapped:
        chunk.local_sums.clear()
    device = accelerator.current().device()
    # One entry per data-parallel rank: all ranks that share its model write into it.
    is_bad = torch.zeros(mpu.get_data_parallel_world_size(), dtype=torch.int32, device=device)
    if sums:
        is_bad[mpu.get_data_parallel_rank()] = (~torch.isfinite(torch.stack(sums))).any()
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    bad_ranks.extend(is_bad.nonzero().flatten().tolist())


def _mean_prediction_loss(predicted: list[torch.Tensor]) -> float:
    """The loss per trained token, over all depths, micro-batches and ranks."""
    total = torch.stack(predicted).sum(0)
    dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))  # each rank counts its part
    loss, tokens = total.tolist()
    return loss / max(tokens, 1.0)


@torch.no_grad()
def outputs_of_last_stage(chunks: Sequence[Any], batch: TrainBatch, read: ReadOutput) -> dict[int, torch.Tensor]:
    """``read``'s values of the model's outputs by position in the batch, on the cpu: ``[R_i, ...]``. Empty on other
    pipeline stages than the last."""
    results: dict[int, torch.Tensor] = {}

    def collect(micro_batch: MicroBatch, output: torch.Tensor, non_loss_data: bool = False) -> None:
        results.update(split_by_sample(read(micro_batch, output), micro_batch.indices, micro_batch.response_lengths))

    def forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        return run_model(model, micro_batch, segments_of(micro_batch)), partial(collect, micro_batch)

    for chunk in chunks:
        chunk.eval()
    for step in range(batch.num_steps):
        run_schedule(forward_step, chunks, batch, step, forward_only=True, collect_non_loss_data=True)
    for chunk in chunks:
        chunk.train()
    return results


def run_schedule(
    forward_step: Callable[..., Any],
    chunks: Sequence[Any],
    batch: TrainBatch,
    step: int,
    *,
    all_rows: bool = False,
    with_trained: bool = False,
    **settings: Any,
) -> None:
    """Run Megatron's schedule over the micro-batches of one step: plain, pipelined or interleaved, by the groups."""
    # Every chunk reads all micro-batches.
    iterators = [batch.micro_batches(step, all_rows=all_rows, with_trained=with_trained) for _ in chunks]
    is_interleaved = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if is_interleaved else iterators[0],
        model=list(chunks) if is_interleaved else chunks[0],
        num_microbatches=batch.num_micro_batches(step),
        seq_length=mpu.get_tensor_model_parallel_world_size(),  # only a placeholder: stages send each other the shapes
        micro_batch_size=1,
        **settings,
    )


def run_model(model: Any, micro_batch: MicroBatch, segments: PackedSegments) -> torch.Tensor:
    """On the last stage the logits ``[n, V/tp]`` of the rows that predict response tokens, or those of all rows as
    ``[1, T, V/tp]`` if the micro-batch asks for them. Hidden states on other stages."""
    packed = micro_batch.packed
    # Our losses read 16-bit logits chunk by chunk, so that no fp32 copy of all of them exists; users' get fp32
    is_ours = segments.head_rows is not None
    is_16_bit = isinstance(model, DistributedDataParallel) and isinstance(model.module, Float16Module)
    dtype = {"fp32_output": False} if is_ours and is_16_bit else {}
    output = model(packed.tokens, packed.position_ids, None, packed_seq_params=segments, **dtype)
    return output.squeeze(0) if unwrap(model).post_process and segments.head_rows is not None else output


def from_last_stage(
    results: dict[int, torch.Tensor], lengths: Sequence[int], shape: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """The last pipeline stage's fp32 values ``[R_i, *shape]`` per sample, in order, on the cpu of every stage."""
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return [results[index] for index in range(len(lengths))]
    device = accelerator.current().device()
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        flat = torch.cat([results[index] for index in range(len(lengths))]).float().to(device)
    else:
        flat = torch.empty((sum(lengths), *shape), dtype=torch.float32, device=device)
    dist.broadcast(flat, mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group())
    return list(flat.cpu().split(list(lengths)))


@dataclass(frozen=True)
class TrainerHooks:
    """The user's functions. None if the flag is not given."""

    args: Namespace
    init: Callable[..., Any] | None = None
    log_prob: Callable[..., Any] | None = None
    train_step: Callable[..., Any] | None = None

    @classmethod
    def load(cls, run: RunConfig) -> TrainerHooks:
        """Load the functions that the flags name.

        Raises:
            ConfigError: a path that cannot be loaded.
        """
        paths = run[PluginArgs]
        return cls(
            run.args,
            init=load_optional(paths.custom_megatron_init_path),
            log_prob=load_optional(paths.custom_megatron_before_log_prob_hook_path),
            train_step=load_optional(paths.custom_megatron_before_train_step_hook_path),
        )

    def after_init(self) -> None:
        """Call the first hook. The process groups exist, the model does not."""
        if self.init is not None:
            self.init(self.args)

    def before_log_probs(self, state: TrainState, store_prefix: str) -> None:
        """Call the second hook. The model holds the weights whose log-probs (columns ``<store_prefix>log_probs``) or
        values are computed next."""
        if self.log_prob is not None:
            self.log_prob(self.args, state.chunks, store_prefix)

    def before_step(self, state: TrainState, rollout_id: int, step: int) -> None:
        """Call the third hook. Gradients are zero, the step's first forward pass is next."""
        if self.train_step is not None:
            self.train_step(self.args, rollout_id, step, state.chunks, state.optimizer, state.scheduler)
