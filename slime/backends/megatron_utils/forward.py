"""Log-probs of the responses under the weights the model holds now, without gradients. Called by ``actor``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.megatron_utils.data import MicroBatch, TrainBatch
from slime.backends.megatron_utils.loss import response_log_probs

__all__ = ["compute_log_probs", "run_model", "split_by_sample"]


@torch.no_grad()
def compute_log_probs(
    model: Any, batch: TrainBatch, settings: AlgorithmArgs, *, vocab_size: int, temperature: float
) -> list[torch.Tensor]:
    """One fp32 tensor ``[R_i]`` per sample of the rank, in the rank's order, on the cpu.

    Uses the micro-batches of the training steps, so that an unchanged model gives the same numbers in both passes.
    """
    results: dict[int, torch.Tensor] = {}

    def collect(micro_batch: MicroBatch, logits: torch.Tensor, non_loss_data: bool = False) -> None:
        log_probs, _ = response_log_probs(
            logits,
            micro_batch,
            vocab_size=vocab_size,
            temperature=temperature,
            chunk_size=settings.log_probs_chunk_size,
        )
        results.update(split_by_sample(log_probs, micro_batch))

    def forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        return run_model(model, micro_batch), partial(collect, micro_batch)

    model.eval()
    for step in range(batch.num_steps):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batch.micro_batches(step),
            model=model,
            num_microbatches=batch.num_micro_batches(step),
            seq_length=0,  # lengths vary; not read without pipeline parallelism
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    model.train()
    return [results[index] for index in sorted(results)]


def run_model(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Logits fp32 ``[1, T, padded vocabulary]``."""
    packed = micro_batch.packed
    return model(packed.tokens, packed.position_ids, None, packed_seq_params=micro_batch.segments)


def split_by_sample(flat: torch.Tensor, micro_batch: MicroBatch) -> dict[int, torch.Tensor]:
    """``[N]`` -> position in the rank's batch -> ``[R_i]`` on the cpu."""
    parts = flat.detach().cpu().split(micro_batch.response_lengths)
    return dict(zip(micro_batch.indices, parts, strict=True))
