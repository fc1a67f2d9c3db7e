"""Passes through the sharded model: one micro-batch forward, and a whole batch's outputs without gradients.

Called by ``step`` and ``actor``. Layers are gathered from all ranks while they compute, so all ranks must run the same
number of micro-batches; the schedule makes it so.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.fsdp_utils.attention import PACKED
from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.loss import response_log_probs
from slime.backends.training.steps import split_by_sample

__all__ = ["compute_log_probs", "run_model"]


def run_model(model: PreTrainedModel, micro_batch: MicroBatch) -> torch.Tensor:
    """Logits ``[n, V]`` of the rows that predict response tokens, or fp32 ``[1, T, V]`` of all rows where the
    micro-batch asks for them."""
    packed, rows = micro_batch.packed, micro_batch.head_rows
    attention: dict[str, Any] = {}
    if model.config._attn_implementation == PACKED:
        attention = {"attention_plan": micro_batch.plan, "cp_group": micro_batch.sharding.cp_group}
    logits: torch.Tensor = model(
        input_ids=packed.tokens,
        position_ids=packed.position_ids,  # which also tell transformers' own attention where samples begin
        use_cache=False,
        logits_to_keep=0 if rows is None else rows,
        **attention,
    ).logits
    return logits.float() if rows is None else logits.squeeze(0)


@torch.no_grad()
def compute_log_probs(
    model: PreTrainedModel,
    batch: TrainBatch,
    settings: AlgorithmArgs,
    *,
    vocab_size: int,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(log-probs, entropies) of the responses under the weights the model holds now: fp32 ``[R_i]`` per sample, in the
    batch's order, on the cpu. Without ``with_entropy`` there are no entropies."""
    log_probs: dict[int, torch.Tensor] = {}
    entropies: dict[int, torch.Tensor] = {}
    model.eval()
    for step in range(batch.num_steps):
        for micro_batch in batch.micro_batches(step):
            values, entropy = response_log_probs(
                run_model(model, micro_batch),
                micro_batch,
                vocab_size=vocab_size,
                temperature=temperature,
                chunk_size=settings.log_probs_chunk_size,
                with_entropy=with_entropy,
            )
            log_probs |= split_by_sample(values, micro_batch)
            if entropy is not None:
                entropies |= split_by_sample(entropy, micro_batch)
    model.train()
    return [log_probs[index] for index in range(batch.num_samples)], [entropies[index] for index in sorted(entropies)]
