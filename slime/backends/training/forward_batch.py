"""Micro-batches of the passes without gradients, which need less memory (``--log-probs-max-tokens-per-gpu``).

The training steps' micro-batches are made where the rollout lives; these are made from the rank's samples by each rank.
All ranks run the same number of them, because experts and pipeline stages of several ranks work together.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from slime.backends.training.data import TrainBatch
from slime.batch.arguments import BatchArgs
from slime.batch.balance import expand_bins_by_splitting, first_fit_pack
from slime.utils import accelerator

__all__ = ["forward_batch", "has_own_micro_batches"]


def has_own_micro_batches(settings: BatchArgs) -> bool:
    """Whether passes without gradients may hold more tokens, or fewer, than training steps."""
    limit = settings.log_probs_max_tokens_per_gpu
    return settings.use_dynamic_batch_size and limit is not None and limit != settings.max_tokens_per_gpu


def forward_batch(batch: TrainBatch, settings: BatchArgs, *, context_parallel_size: int, multiple: int) -> TrainBatch:
    """The batch with the micro-batches of a pass without gradients. A collective over all ranks.

    Args:
        multiple: the number of micro-batches must be one of it (interleaved pipelines).
    """
    if not has_own_micro_batches(settings):
        return batch
    assert settings.log_probs_max_tokens_per_gpu is not None, "has_own_micro_batches looked"
    lengths = [len(tokens) for tokens in batch.columns["tokens"]]
    bins = first_fit_pack(lengths, settings.log_probs_max_tokens_per_gpu * context_parallel_size)
    largest, fewest_samples = _over_all_ranks(len(bins), len(lengths))
    target = math.ceil(largest / multiple) * multiple
    if target > fewest_samples:
        return batch  # some rank has too few samples for its share
    expand_bins_by_splitting(bins, target, lengths)
    return batch.with_micro_batches(bins)


def _over_all_ranks(num_bins: int, num_samples: int) -> tuple[int, int]:
    """Most micro-batches and fewest samples of a rank."""
    values = torch.tensor([num_bins, -num_samples], device=accelerator.current().device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    most, fewest = values.tolist()
    return int(most), -int(fewest)
