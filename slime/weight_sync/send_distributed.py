"""Sends weights over a process group (NCCL or gloo).

The trainer is rank 0, and engine i has the next ``num_gpus`` ranks.

Each chunk takes one HTTP call per engine with names, dtypes and shapes, and then one broadcast per tensor straight from
the trainer's memory. Small tensors, for which a collective costs more than a copy, are copied to one buffer and sent
first as one tensor. At most two chunks are in flight: the next chunk is gathered while engines receive and load one.

    trainer    gather 0 | gather 1                | wait | gather 2                | wait ...
    transfer            | broadcast 0, load 0     |      | broadcast 1, load 1     | ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.backends import EngineFleet, NamedTensor, PendingCalls
from slime.utils import accelerator
from slime.utils.distributed_utils import destroy_group, in_thread, join_group
from slime.utils.errors import DeadlineExceeded
from slime.utils.net import WEIGHT_INTERFACES
from slime.weight_sync.chunks import WeightChunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Timeout of leaving the group at the end or after a failure, when an engine may never answer.
_LEAVE_TIMEOUT_S = 60.0
# A tensor below this: a broadcast costs 0.1 to 0.6 ms on a CPU, in which gloo moves 700 KB and more.
_SMALL_BYTES = 512 * 1024
# Up to this number, small tensors are sent like large ones: the extra HTTP call of a flat chunk takes 3 ms.
_FEW = 8


@dataclass(frozen=True)
class _UnderWay:
    """One chunk between trainer and engines.

    Attributes:
        parts: the tensors of the broadcasts. Their memory must live until they have arrived.
        memory: buffer of a flat chunk, for the next one.
    """

    receiving: PendingCalls
    broadcasts: Future[list[Any]]
    parts: Sequence[torch.Tensor]
    memory: torch.Tensor | None


class DistributedSender:
    """Owns the process group between one trainer rank and the engines. Lives on the trainer's weight source rank."""

    def __init__(self, fleet: EngineFleet, *, group_name: str, timeout_s: float) -> None:
        self._fleet = fleet
        self._group_name = group_name
        self._timeout_s = timeout_s
        self._group: ProcessGroup | None = None
        self._under_way: _UnderWay | None = None
        self._spare: torch.Tensor | None = None

    def connect(self, master_address: str, master_port: int) -> None:
        """Form the group with all engines of the fleet."""
        sizes = [engine.num_gpus for engine in self._fleet.engines]
        offsets = [1 + before for before in accumulate([0, *sizes[:-1]])]
        world_size = 1 + sum(sizes)
        backend = accelerator.current().communication_backend
        # started before join_group() and awaited beside it: no member returns before all have joined
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
            interfaces=self._interfaces(),
            wait=lambda: joining.wait(self._timeout_s),
        )

    def _interfaces(self) -> str | None:
        # external engines may use any number of connections, so the interfaces cannot be divided
        has_strangers = any(engine.first_slot is None for engine in self._fleet.engines)
        return None if has_strangers else os.environ.get(WEIGHT_INTERFACES)

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        """Start to send ``chunk``. Returns when its small tensors, and the chunk before it, have been applied."""
        small, large = chunk.divided(_is_small)
        if large.tensors and len(small.tensors) <= _FEW and not any(map(_needs_bytes, small.tensors)):
            small, large = WeightChunk([]), chunk
        if small.tensors:
            self._send(small, weight_version, is_flat=True)
        if large.tensors:
            self._send(large, weight_version, is_flat=False)

    def _send(self, chunk: WeightChunk, weight_version: str, *, is_flat: bool) -> None:
        """Start one call and its broadcasts: one per tensor, or with ``is_flat`` one of all bytes."""
        memory = self._memory(chunk) if is_flat else None
        if memory is None:
            parts = [tensor.detach().contiguous() for _, tensor in chunk.tensors]
        else:
            parts = [chunk.flatten(out=memory[: chunk.num_bytes])]
        # here and not earlier: the engines load the chunk before while this one is prepared
        self._arrive()
        receiving = self._fleet.start(
            "update_weights_from_distributed",
            names=[name for name, _ in chunk.tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk.tensors],
            shapes=[list(tensor.shape) for _, tensor in chunk.tensors],
            group_name=self._group_name,
            weight_version=weight_version,
            load_format="flattened_bucket" if is_flat else None,
        )
        group = self._group
        # In a thread: NCCL connects the members in the first broadcast, and waits without a deadline for an engine that
        # died. Its call, which has a deadline, names it.
        broadcasts = in_thread(
            lambda: [dist.broadcast(part, src=0, group=group, async_op=True) for part in parts], self._group_name
        )
        self._under_way = _UnderWay(receiving, broadcasts, parts, memory)

    def finish(self) -> None:
        """Return when the engines have applied everything."""
        self._arrive()
        self._spare = None

    def _memory(self, chunk: WeightChunk) -> torch.Tensor:
        """The buffer of an earlier chunk if it is large enough: page faults of fresh memory cost more than the copy."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.numel() >= chunk.num_bytes:
            return spare
        return torch.empty(chunk.num_bytes, dtype=torch.uint8, device=chunk.tensors[0][1].device)

    def _arrive(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.receiving.wait(self._timeout_s)  # first: an engine that refuses never joins the broadcasts
            for broadcast in self._started(under_way.broadcasts):
                broadcast.wait()
            if under_way.memory is not None:
                self._spare = under_way.memory

    def _started(self, broadcasts: Future[list[Any]]) -> list[Any]:
        try:
            return broadcasts.result(self._timeout_s)
        except TimeoutError:
            urls = ", ".join(engine.url for engine in self._fleet.engines)
            raise DeadlineExceeded(
                f"the broadcasts of weights to {urls} have not begun within {self._timeout_s:g} s "
                "(--weight-sync-timeout), though the engines have answered."
            ) from None

    def disconnect(self) -> None:
        """Leave the group, also in the middle of a chunk."""
        self._under_way = self._spare = None
        if self._group is None:
            return
        leaving = self._fleet.start("destroy_weights_update_group", group_name=self._group_name)
        group, self._group = self._group, None
        # between start and wait, because either side may wait for the other to leave
        destroy_group(group)
        leaving.wait(min(self._timeout_s, _LEAVE_TIMEOUT_S))


def _is_small(named: NamedTensor) -> bool:
    return named[1].nbytes < _SMALL_BYTES or _needs_bytes(named)


def _needs_bytes(named: NamedTensor) -> bool:
    """Whether the tensor can only be sent as bytes."""
    # gloo has no 8-bit floats
    return named[1].element_size() == 1
