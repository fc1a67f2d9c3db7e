"""The loss of one micro-batch: dispatch by --loss-type, and the scaling that Megatron's schedule expects.

Called by ``step``. The formulae are in ``slime.algorithms``; nothing here knows an algorithm.

Megatron's schedule computes ``loss / max(normaliser, 1) / num_micro_batches`` and its data-parallel wrapper averages
gradients over the ranks, unless the config says per-token: then it sums over ranks and divides by the sum of all
normalisers. Hence the factors in :func:`micro_batch_loss`, which leave

    rollout mean    grad = 1 / rollouts of the step * sum over rollouts of grad of the rollout's token mean
    per token       grad = sum over tokens of grad / trained tokens of the step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.algorithms.logprobs import log_probs_and_entropy
from slime.algorithms.policy_loss import PolicyTokens, policy_loss
from slime.algorithms.reduce import count_tokens, make_reducer
from slime.algorithms.sft import sft_loss
from slime.algorithms.types import LossOutput
from slime.backends.megatron_utils.data import MicroBatch, TrainBatch

__all__ = ["LossScale", "MicroBatchLoss", "micro_batch_loss", "response_log_probs"]


@dataclass(frozen=True)
class LossScale:
    """What the scaling depends on besides the micro-batch."""

    num_micro_batches: int
    num_rollouts: int
    data_parallel_size: int


@dataclass(frozen=True)
class MicroBatchLoss:
    """What Megatron's schedule takes, and what is reported.

    Attributes:
        loss: scaled scalar with a graph.
        num_tokens: integer scalar, Megatron's normaliser.
        names: metric names.
        values: fp32 [1 + metrics]: trained tokens in per-token mode (else 0), then each metric in reducer space.
        log_probs: [N] detached.
    """

    loss: torch.Tensor
    num_tokens: torch.Tensor
    names: list[str]
    values: torch.Tensor
    log_probs: torch.Tensor


def response_log_probs(
    logits: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    vocab_size: int,
    temperature: float,
    chunk_size: int,
    with_entropy: bool = False,
    with_entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits ``[1, T, V]`` -> log-probs and entropies ``[N]`` of the response tokens, samples in order."""
    rows = logits.squeeze(0).index_select(0, micro_batch.packed.response_rows)
    return log_probs_and_entropy(
        rows,
        micro_batch.packed.response_targets,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        with_entropy_grad=with_entropy_grad,
    )


def micro_batch_loss(
    logits: torch.Tensor,
    micro_batch: MicroBatch,
    batch: TrainBatch,
    settings: AlgorithmArgs,
    scale: LossScale,
    *,
    vocab_size: int,
    temperature: float,
) -> MicroBatchLoss:
    """The scaled loss of ``micro_batch`` from its logits ``[1, T, V]``."""
    indices = micro_batch.indices
    is_policy = settings.loss_type == "policy_loss"
    log_probs, entropy = response_log_probs(
        logits,
        micro_batch,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=settings.log_probs_chunk_size,
        with_entropy=is_policy,
        with_entropy_grad=settings.entropy_coef != 0,
    )
    masks = batch.masks(indices)
    reduce = make_reducer(
        micro_batch.response_lengths,
        masks,
        batch.mask_sums(indices),
        per_token=settings.calculate_per_token_loss,
    )
    output: LossOutput
    match settings.loss_type:
        case "policy_loss":
            advantages = batch.flat("advantages", indices)
            assert advantages is not None, "advantages are computed before the steps"
            tokens = PolicyTokens(
                log_probs=log_probs,
                advantages=advantages,
                entropy=entropy,
                old_log_probs=batch.flat("log_probs", indices),
                rollout_log_probs=batch.flat("rollout_log_probs", indices),
                ref_log_probs=batch.flat("ref_log_probs", indices),
            )
            output = policy_loss(tokens, settings, reduce)
        case "sft_loss":
            output = sft_loss(log_probs, reduce)
        case other:
            raise ValueError(f"--loss-type {other} is not supported")
    num_tokens = count_tokens(masks)
    if settings.calculate_per_token_loss:
        loss, normaliser = output.loss.clone(), num_tokens
    else:
        factor = scale.num_micro_batches * scale.data_parallel_size / scale.num_rollouts
        loss, normaliser = output.loss * factor, torch.ones_like(num_tokens)
        num_tokens = torch.zeros_like(num_tokens)
    values = torch.stack([num_tokens.float(), *(value.float() for value in output.metrics.values())])
    return MicroBatchLoss(loss, normaliser.int(), list(output.metrics), values, log_probs.detach())
