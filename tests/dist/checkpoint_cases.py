"""Functions that a rank runs in the tests of checkpoints across layouts: train, save, load, train on."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import ConfigError, SlimeError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, split_batch, weights_of



def run(
    rank: int,
    world_size: int,
    hf: str,
    args: dict[str, Any],
    rollouts: list[int],
    save_after: list[int],
    full_disk_on: int | None = None,
    full_for: str = "shards",
) -> dict[str, Any]:
    """Train on ``rollouts`` and save after some of them.

    Returns:
        start: the first rollout id.
        weights_at_start, weights: whole, under Hugging Face names.
        error: of the set-up or of a save. With ``full_disk_on`` this rank's disk is full for shards or the manifest.
    """
    torch.use_deterministic_algorithms(True)
    trainer = MegatronTrainer(make_args(hf, **args), rank=rank, world_size=world_size, with_ref=False)
    try:
        start = trainer.setup()
    except ConfigError as error:
        return {"error": str(error)}
    if rank == full_disk_on:
        _fill_disk(full_for)
    at_start = weights_of(trainer)
    error = ""
    for rollout_id in rollouts:
        dp_rank, dp_size = trainer.data_parallel
        trainer.train(rollout_id, split_batch(make_batch(8, seed=rollout_id), dp_rank, dp_size, size=2))
        if rollout_id in save_after:
            try:
                trainer.save(rollout_id)
            except SlimeError as caught:
                error = str(caught)
    return {"start": start, "weights_at_start": at_start, "weights": weights_of(trainer), "error": error}




def _fill_disk(full_for: str) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from slime.backends.training import checkpoint_files

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if full_for == "manifest":
        checkpoint_files.write_manifest = full
    else:
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(full)
