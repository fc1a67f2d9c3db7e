"""The old policy's log-probs together with its entropy, for ``--use-rollout-entropy``. Called by ``actor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.algorithms.arguments import AlgorithmArgs
from slime.backends.megatron_utils.forward import forward_only, from_last_stage, tensor_group
from slime.backends.training.data import MicroBatch, TrainBatch
from slime.backends.training.loss import response_log_probs
from slime.backends.training.steps import split_by_sample

__all__ = ["compute_log_probs_and_entropy"]


def compute_log_probs_and_entropy(
    chunks: Sequence[Any], batch: TrainBatch, settings: AlgorithmArgs, *, vocab_size: int, temperature: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(log-probs, entropies) of the responses under the weights the model holds now, as ``forward_only`` gives them."""
    entropies: dict[int, torch.Tensor] = {}  # filled on the last pipeline stage

    def read(micro_batch: MicroBatch, logits: torch.Tensor) -> torch.Tensor:
        log_probs, entropy = response_log_probs(
            logits,
            micro_batch,
            vocab_size=vocab_size,
            temperature=temperature,
            chunk_size=settings.log_probs_chunk_size,
            tensor_group=tensor_group(),
            with_entropy=True,
        )
        assert entropy is not None, "asked for"
        entropies.update(split_by_sample(entropy, micro_batch))
        return log_probs

    log_probs = forward_only(chunks, batch, read)
    return log_probs, from_last_stage(entropies, batch.columns["response_lengths"])
