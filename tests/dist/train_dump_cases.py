"""Functions that a rank runs in ``test_train_dump``: train on its part of a rollout, which is dumped."""

from __future__ import annotations

from typing import Any

from slime.backends.megatron_utils.actor import MegatronTrainer
from tests.unit.megatron_utils.tiny_trainer import make_args, split_batch


def train_and_dump(rank: int, world_size: int, hf: str, batch: dict[str, Any], args: dict[str, Any]) -> None:
    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    trainer.setup()
    trainer.train(2, split_batch(batch, *trainer.data_parallel))
