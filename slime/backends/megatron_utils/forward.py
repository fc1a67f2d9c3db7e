"""Passes through the model: one micro-batch forward, and a step's or a whole batch's outputs without gradients.

Called by ``step`` and ``actor``. Knows Megatron's schedules: with pipeline parallelism the last stage has the outputs,
and :func:`from_last_stage` gives them to the others, so that every rank holds the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from slime.backends.megatron_utils.model.attention import PackedSegments, segments_of
from slime.backends.megatron_utils.model.gpt import unwrap
from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.steps import ReadOutput, split_by_sample
from slime.utils import accelerator

__all__ = [
    "from_last_stage",
    "outputs_of_last_stage",
    "run_model",
    "run_schedule",
    "tensor_group",
]


@torch.no_grad()
def outputs_of_last_stage(chunks: Sequence[Any], batch: TrainBatch, read: ReadOutput) -> dict[int, torch.Tensor]:
    """``read``'s values of the model's outputs by position in the batch, on the cpu: ``[R_i, ...]``; nothing on other
    pipeline stages than the last."""
    results: dict[int, torch.Tensor] = {}

    def collect(micro_batch: MicroBatch, output: torch.Tensor, non_loss_data: bool = False) -> None:
        results.update(split_by_sample(read(micro_batch, output), micro_batch))

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
    """Megatron's schedule over the micro-batches of one step: plain, pipelined or interleaved, as the groups say."""
    iterators = [batch.micro_batches(step, all_rows=all_rows, with_trained=with_trained) for _ in chunks]
    is_interleaved = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if is_interleaved else iterators[0],
        model=list(chunks) if is_interleaved else chunks[0],
        num_microbatches=batch.num_micro_batches(step),
        seq_length=mpu.get_tensor_model_parallel_world_size(),  # only a placeholder: stages tell each other the shapes
        micro_batch_size=1,
        **settings,
    )


def run_model(model: Any, micro_batch: MicroBatch, segments: PackedSegments) -> torch.Tensor:
    """On the last stage the logits ``[n, V/tp]`` of the rows that predict response tokens, or those of all rows as
    ``[1, T, V/tp]`` where the micro-batch asks for them; hidden states on other stages."""
    packed = micro_batch.packed
    # Our losses read 16-bit logits chunk by chunk, so that no fp32 copy of all of them exists; users' get fp32
    is_ours = segments.head_rows is not None
    dtype = {"fp32_output": False} if is_ours and isinstance(getattr(model, "module", None), Float16Module) else {}
    output = model(packed.tokens, packed.position_ids, None, packed_seq_params=segments, **dtype)
    return output.squeeze(0) if unwrap(model).post_process and segments.head_rows is not None else output


def tensor_group() -> dist.ProcessGroup | None:
    """The ranks that share the vocabulary; None for one rank, which needs no collectives."""
    return mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None


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
