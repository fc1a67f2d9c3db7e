"""The engine's choices of experts in the order in which this rank's routers see the tokens.

    sample      rows of its tokens but the last, from the engine          [L - 1, layers, topk]
    whole       the micro-batch as it is packed; last tokens and padding
                get experts in turn, which nothing depends on             [T, layers, topk]
    rank        the zigzag part of the context-parallel rank, then the
                slice of the tensor rank under sequence parallelism       [t, layers, topk]

A last token and the padding come behind every token that counts, so causal attention keeps them out of its logits and
gradients. Called by ``actor``; ``routing_replay`` hands the rows to the routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state as mpu

from slime.backends.training.context_parallel import Sharding, zigzag_rows
from slime.backends.training.data import TrainBatch
from slime.data.engine_meta import check_routed_experts
from slime.models.shape import ModelShape
from slime.utils.errors import DataError

__all__ = ["COLUMN", "engine_choices", "lay_out"]

COLUMN = "rollout_routed_experts"


def engine_choices(batch: TrainBatch, shape: ModelShape) -> Iterator[torch.Tensor]:
    """``[t, num_layers, topk]`` for every micro-batch of all steps, in order.

    Raises:
        DataError: the batch lacks the engine's choices, or they are not those of this model.
    """
    moe = shape.moe
    assert moe is not None, "setup refuses replay for a model without experts"
    if batch.columns.get(COLUMN) is None:
        raise DataError(
            f"--use-rollout-routing-replay: the batch has no column {COLUMN}. Every sample must carry the experts that "
            "the engine chose (meta_info routed_experts of a request with return_routed_experts)."
        )
    experts = [value for value in batch.columns[COLUMN] if len(value)]
    layers = [layer for layer, has_experts in enumerate(moe.layers) if has_experts]
    try:
        check_routed_experts(
            experts, num_layers=shape.num_layers, topk=moe.topk, moe_layers=layers, num_experts=moe.num_experts
        )
    except ValueError as error:
        raise DataError(f"--use-rollout-routing-replay: {error}.") from None
    for step in range(batch.num_steps):
        for micro_batch in batch.micro_batches(step):
            yield lay_out(
                batch.select(COLUMN, micro_batch.indices),
                micro_batch.packed.cu_seqlens.cpu(),
                batch.sharding,
                num_experts=moe.num_experts,
                tensor_rank=mpu.get_tensor_model_parallel_rank(),
            )


def lay_out(
    experts: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    sharding: Sharding,
    *,
    num_experts: int,
    tensor_rank: int = 0,
) -> torch.Tensor:
    """The choices of one micro-batch as this rank's routers need them: ``[t, layers, topk]``.

    Args:
        experts: ``[L - 1, layers, topk]`` of its samples, in order.
        cu_seqlens: ``[S + 1]`` borders of the whole micro-batch's segments; one more than there are samples is padding.
        tensor_rank: rank in the tensor-parallel group.
    """
    _, layers, topk = experts[0].shape
    total = int(cu_seqlens[-1])
    filler = (torch.arange(total * topk) % num_experts).to(experts[0].dtype)  # spread evenly, distinct in a row
    whole = filler.view(total, 1, topk).expand(total, layers, topk).clone()
    for start, value in zip(cu_seqlens.tolist(), experts, strict=False):
        whole[start : start + len(value)] = value
    if sharding.cp_size > 1:
        whole = whole[zigzag_rows(cu_seqlens, sharding.cp_rank, sharding.cp_size)]
    return whole.chunk(sharding.sequence_multiple)[tensor_rank] if sharding.sequence_multiple > 1 else whole
