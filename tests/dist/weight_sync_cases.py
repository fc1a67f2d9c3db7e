"""Trainer ranks that send weights to colocated engines: what each engine could open, and who was told what failed."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.protocols import EngineInfo, NamedTensor, Recipients
from slime.utils.errors import EngineError
from slime.weight_sync import send_tensor
from slime.weight_sync.session import TrainerRanks
from slime.weight_sync.session import WeightUpdate
from slime.weight_sync.updater import WeightUpdater
from tests.unit.weight_sync.fakes import RecordingFleet


class Trainer:
    """The same three tensors on every rank, the experts that the rank is asked for, and how often it gathered."""

    def __init__(self, rank: int, num_experts: int) -> None:
        self.num_gathered = 0
        self.rank, self.num_experts = rank, num_experts

    def export_weights(self, bucket_bytes: int, recipients: Recipients) -> Iterator[NamedTensor]:
        for index in range(3):
            self.num_gathered += 1
            yield f"w{index}", torch.arange(8.0) + index
        for expert in recipients.experts(self.rank, self.num_experts):
            yield f"expert{expert}", torch.arange(4.0) + expert


def send_to_colocated(
    rank: int,
    world_size: int,
    engines: list[tuple[int, int]],
    fails: str | None = None,
    num_experts: int = 0,
    expert_blocks: int = 1,
    changed_only: bool = False,
) -> dict[str, Any]:
    """Two updates. ``engines``: (first slot, devices) of each. Returns what this rank saw.

    Args:
        fails: ``memory`` lets rank 1 find no shared memory once, ``engine`` lets the last engine refuse once.
    """
    dist.init_process_group("gloo")
    opened: list[tuple[str, int, dict[str, list[float]]]] = []

    def load(serialized_named_tensors: list[str], weight_version: str) -> None:
        if fails == "engine" and weight_version == "1" and rank == engines[-1][0]:
            raise EngineError("wrong shape")
        for slot, text in enumerate(serialized_named_tensors):
            bucket = pickle.loads(base64.b64decode(text))
            flat = bucket["flattened_tensor"]
            tensors = {
                meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape).tolist()
                for meta in bucket["metadata"]
            }
            opened.append((weight_version, slot, tensors))

    infos = [
        EngineInfo(f"http://{first}", count, first_slot=first, expert_blocks=expert_blocks) for first, count in engines
    ]
    fleet = RecordingFleet(infos, update_weights_from_tensor=load, weight_version=lambda: version)
    shareable = send_tensor.shareable

    def scarce(chunk: Any) -> torch.Tensor:
        if fails == "memory" and rank == 1 and version == "1":
            raise EngineError("no shared memory")
        return shareable(chunk)

    send_tensor.shareable = scarce
    ranks = TrainerRanks(rank, world_size, timeout_s=600)
    updater = WeightUpdater(ranks, address="127.0.0.1", shares_devices=True, timeout_s=600, changed_only=changed_only)
    trainer, errors = Trainer(rank, num_experts), []
    for version in ("1", "2"):
        update = WeightUpdate(version, max_chunk_bytes=32, timeout_s=600)
        try:
            updater.update(fleet, trainer, update)
        except EngineError as error:
            errors.append(str(error))
    return {"opened": opened, "verbs": fleet.verbs, "errors": errors, "gathered": trainer.num_gathered}
