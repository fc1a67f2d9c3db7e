"""Functions of a rank in ``test_data_parallel`` and ``test_fsdp``: train on its part of each rollout, save, export."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends import SOURCE
from tests.unit.megatron_utils.tiny_trainer import make_args, split_batch


def run_job(
    rank: int,
    world_size: int,
    hf: str,
    args: dict[str, Any],
    batches: list[dict[str, Any]],
    num_rollouts: int,
    num_steps: int,
    save_hf: str | None = None,
    offloads: bool = False,
    size: int = 3,
) -> dict[str, Any]:
    """Train, with ``offloads`` giving all device memory back after every rollout.

    Returns the rollout id it started with, a report per rollout, and the weights at the end.
    """
    settings = make_args(hf, **args)
    make = _trainer(settings.train_backend)
    trainer = make(settings, rank=rank, world_size=world_size, with_ref=settings.use_kl_loss)
    start = trainer.setup()
    cp_size = settings.context_parallel_size
    assert trainer.data_parallel == (rank // cp_size, world_size // cp_size)
    assert trainer.is_weight_source == (rank == 0)
    reports = []
    for rollout_id in range(start, num_rollouts):
        part = split_batch(batches[rollout_id], *trainer.data_parallel, num_steps, size=size)
        report = trainer.train(rollout_id, part)
        assert bool(report.steps) == (rank == 0)
        reports.append(report)
        if offloads:
            trainer.offload()
            trainer.onload()
    if settings.save is not None:
        trainer.save(num_rollouts - 1)
    if save_hf is not None:
        trainer.save_hf(save_hf)
    weights = {name: value.clone() for name, value in trainer.export_weights()}
    at_source = [(name, torch.equal(weights[name], value)) for name, value in trainer.export_weights(1 << 20, SOURCE)]
    assert at_source == ([(name, True) for name in weights] if rank == 0 else [])
    return {"start": start, "reports": reports, "weights": weights}


def _trainer(backend: str) -> Any:
    if backend == "fsdp":
        from slime.backends.fsdp_utils.actor import FsdpTrainer

        return FsdpTrainer
    from slime.backends.megatron_utils.actor import MegatronTrainer

    return MegatronTrainer
