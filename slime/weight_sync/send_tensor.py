"""Weights for engines on the trainer's own devices: no byte leaves the host, engines open the trainer's memory.

An engine with n tensor-parallel ranks shares the device slots of n trainer ranks. Each of these lays out a chunk in
memory of its own (shared memory on a CPU, device memory on a GPU), and the first of them, the *speaker*, collects the n
handles and makes the engine's one HTTP call; engine rank k opens handle k, which was made on its own device.

    trainer rank s      lay out | gather handles --> update_weights_from_tensor([h0, ..., hn-1]) --> engine
    trainer rank s+k    lay out | give handle ---^

While the engines load a chunk the next is gathered and laid out; memory of a chunk is freed when its engine has
answered. Every trainer rank has such a sender; a rank without an engine only takes part in gathering the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.backends.protocols import EngineFleet, PendingCalls
from slime.utils import accelerator
from slime.utils.errors import EngineError
from slime.weight_sync.chunks import WeightChunk
from slime.weight_sync.payload import serialized, shareable
from slime.weight_sync.ranks import TrainerRanks

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["TensorSender"]


class TensorSender:
    """For the engine that covers this rank's device, if one does.

    Args:
        fleet: colocated engines only; ``first_slot`` is the trainer rank of an engine's first device.
        ranks: the trainer's; making a sender is a meeting of all of them.
    """

    def __init__(self, fleet: EngineFleet, ranks: TrainerRanks, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._engine: EngineFleet | None = None
        self._speaks = False
        self._group: ProcessGroup | None = None
        self._flat: torch.Tensor | None = None
        self._loading: PendingCalls | None = None
        self._failure: Exception | None = None
        for index, engine in enumerate(fleet.engines):
            assert engine.first_slot is not None, f"{engine.url} is not on the trainer's devices"
            members = range(engine.first_slot, engine.first_slot + engine.num_gpus)
            group = ranks.group(members)
            if ranks.rank in members:
                self._engine, self._group = fleet.only([index]), group
                self._speaks = ranks.rank == members[0]

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        """Start to send ``chunk``. What fails is raised by :meth:`finish`: the other ranks must not be left waiting."""
        if self._engine is None:
            return
        flat, payload, problem = None, "", None
        if self._failure is None:
            try:
                flat = shareable(chunk)
                payload = serialized(flat, chunk)
            except Exception as error:
                problem = f"trainer rank {self._ranks.rank}: {error}"
        self._arrive()
        said = self._ranks.gather((payload, problem), self._group)
        # all ranks have met: the engine is done with the chunk before, whose memory may go
        self._flat = flat
        problems = [what for _, what in said if what is not None]
        if problems and self._failure is None:
            self._failure = EngineError("; ".join(problems))
        if self._speaks and self._failure is None:
            self._loading = self._engine.start(
                "update_weights_from_tensor",
                serialized_named_tensors=[text for text, _ in said],
                weight_version=weight_version,
            )

    def finish(self) -> None:
        """Return when the engine has everything, with the first failure if there was one."""
        self._arrive()
        if self._engine is not None:
            self._ranks.gather(None, self._group)
        failure = self._failure
        self._flat = self._failure = None
        accelerator.current().give_back_shared()
        if failure is not None:
            raise failure

    def _arrive(self) -> None:
        """Wait until the engine has answered for the chunk before; only the rank that speaks with it knows."""
        loading, self._loading = self._loading, None
        if loading is None:
            return
        try:
            loading.wait(self._timeout_s)
        except Exception as error:
            self._failure = self._failure or error

    def disconnect(self) -> None:
        """Forget the engine."""
        import torch.distributed as dist

        self._flat = self._loading = self._failure = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
