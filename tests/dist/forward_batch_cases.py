"""Functions that a rank runs in ``test_forward_batch``: compute log-probs with and without separate micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.training.data import TrainBatch
from tests.unit.megatron_utils.tiny_trainer import make_args, split_batch


def both_passes(
    rank: int, world_size: int, hf: str, batch: dict[str, Any], args: dict[str, Any], own: int
) -> dict[str, Any]:
    """Log-probs and sizes of the micro-batches, by the steps' micro-batches and by those of the limit ``own``."""
    settings = make_args(hf, use_dynamic_batch_size=True, max_tokens_per_gpu=1, **args)
    trainer = MegatronTrainer(settings, rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    part = split_batch(batch, *trainer.data_parallel, size=1)
    train_batch = TrainBatch(dict(part), torch.device("cpu"), trainer._ready.sharding)
    shared = trainer._log_probs(train_batch)
    settings.log_probs_max_tokens_per_gpu = own
    passes = trainer._for_passes(train_batch)
    separate = trainer._log_probs(train_batch)
    lengths = part["total_lengths"]
    return {
        "shared": shared,
        "separate": separate,
        "tokens": [sum(lengths[i] for i in bin_) for bin_ in passes.columns["micro_batch_indices"]],
        "num_steps": passes.num_steps,
    }
