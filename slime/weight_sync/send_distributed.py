"""Weights over a process group: the trainer is rank 0, engine i owns the next ``num_gpus`` ranks; NCCL or gloo.

Each chunk is one HTTP call per engine, which tells names, dtypes and shapes, and one broadcast of the flat bytes.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from slime.backends.protocols import EngineFleet
from slime.utils import accelerator
from slime.utils.distributed_utils import destroy_group, join_group
from slime.weight_sync.chunks import WeightChunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DistributedSender"]


class DistributedSender:
    """Owns the process group between one trainer rank and the engines. Lives on the trainer's weight source rank."""

    def __init__(self, fleet: EngineFleet, *, group_name: str, timeout_s: float) -> None:
        self._fleet = fleet
        self._group_name = group_name
        self._timeout_s = timeout_s
        self._group: ProcessGroup | None = None

    def connect(self, master_address: str, master_port: int) -> None:
        """Form the group. Every engine joins while this rank does: nobody returns before all are there."""
        sizes = [engine.num_gpus for engine in self._fleet.engines]
        offsets = [1 + before for before in accumulate([0, *sizes[:-1]])]
        world_size = 1 + sum(sizes)
        backend = accelerator.current().communication_backend
        joining = self._fleet.start(
            "init_weights_update_group",
            each=[{"rank_offset": offset} for offset in offsets],
            master_address=master_address,
            master_port=master_port,
            world_size=world_size,
            group_name=self._group_name,
            backend=backend,
        )
        self._group = join_group(
            master_address,
            master_port,
            rank=0,
            world_size=world_size,
            group_name=self._group_name,
            backend=backend,
            timeout_s=self._timeout_s,
        )
        joining.wait(self._timeout_s)

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        import torch.distributed as dist

        flat = chunk.flatten()
        receiving = self._fleet.start(
            "update_weights_from_distributed",
            names=[name for name, _ in chunk.tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk.tensors],
            shapes=[list(tensor.shape) for _, tensor in chunk.tensors],
            group_name=self._group_name,
            weight_version=weight_version,
        )
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        receiving.wait(self._timeout_s)  # first: an engine that refuses never joins the broadcast
        work.wait()

    def disconnect(self) -> None:
        if self._group is None:
            return
        leaving = self._fleet.start("destroy_weights_update_group", group_name=self._group_name)
        destroy_group(self._group)
        self._group = None
        leaving.wait(self._timeout_s)
