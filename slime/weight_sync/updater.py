"""Sends weights through memory and network: chooses a sender for each engine, and keeps the connections.

    --update-weight-transport   engine                             travels by
    nccl                        on the trainer's own devices       TensorSender: shared memory or CUDA IPC
    nccl                        on other devices                   DistributedSender: broadcasts from rank 0
    disk                        any                                files that engines load: see send_disk

Without a TensorSender only rank 0 gets the weights. With TensorSenders alone, ranks whose engine divides the experts
among its devices get the experts of their device.

Every rank of the trainer has one, and all call it at the same time. Called by ``slime.ray.train_actor``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from slime.backends import EVERY_RANK, SOURCE, EngineFleet, EngineInfo, Recipients, WeightExporter
from slime.utils import accelerator
from slime.utils.errors import undone
from slime.utils.net import claim_ports
from slime.weight_sync.chunks import SentBefore, WeightChunk, bucket_bytes
from slime.weight_sync.root_hash import places_of
from slime.weight_sync.send_distributed import DistributedSender
from slime.weight_sync.send_tensor import TensorSender
from slime.weight_sync.session import ChunkSender, TrainerRanks, WeightUpdate, error_of, push_weights

logger = logging.getLogger(__name__)


class Updater(Protocol):
    """One way of sending weights. All ranks of the trainer have the same kind, and call it at the same time."""

    @property
    def changed_share(self) -> float | None:
        """Changed bytes over all bytes in the last update, if it sent differences. Known on the source only."""

    def update(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        """Make the live weights those of every engine. Returns the bytes sent (to each engine), on the source."""

    def disconnect(self) -> None:
        """Leave the engines."""


class WeightUpdater:
    """Sends weights through memory and network. Connections live until the fleet changes, or an update fails.

    Args:
        address: of this rank's host, where engines find the process group.
        shares_devices: engines may sit on the trainer's devices (``--colocate``).
        timeout_s: longest wait for engines and for other ranks.
        changed_only: leave out tensors that the engines hold already.
    """

    changed_share: float | None = None

    def __init__(
        self,
        ranks: TrainerRanks,
        *,
        address: str,
        shares_devices: bool,
        timeout_s: float,
        changed_only: bool = False,
    ) -> None:
        self._ranks = ranks
        self._address = address
        self._shares_devices = shares_devices
        self._timeout_s = timeout_s
        self._senders: Senders | None = None
        self._fleet: EngineFleet | None = None
        self._group_numbers = itertools.count()
        self._sent_before = SentBefore() if changed_only else None

    def update(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        """Send the live weights to every engine of ``fleet``. Returns the bytes sent per engine, on the source.

        Raises: as :func:`slime.weight_sync.session.push_weights`.
        """
        # an engine may have died: the next update makes new connections
        with undone(lambda: self.disconnect(is_urgent=True)):
            senders = self._connected(fleet)
            if update.max_chunk_bytes is None:
                # equal on all ranks: they gather the same buckets
                size = min(self._ranks.gather(bucket_bytes(accelerator.current().free_memory())))
                update = replace(update, max_chunk_bytes=size)
            assert update.max_chunk_bytes is not None
            weights = trainer.export_weights(update.max_chunk_bytes, self.recipients(fleet.engines))
            wants = None if self._sent_before is None else self._sent_before.begin()
            hashed = places_of(fleet.engines, self._places(fleet.engines)[0], self._ranks.rank)
            root = None if update.proof is None else update.proof.begin(hashed)
            return push_weights(fleet, senders, weights, update, self._ranks, wants, root)

    def _connected(self, fleet: EngineFleet) -> Senders:
        """Return the senders, new ones if the fleet changed or an update failed. A collective of all ranks."""
        is_usable = self._senders is not None and self._fleet == fleet
        # one rank without connections is enough: connecting is a collective, so all ranks reconnect
        if not self._ranks.agree(None if is_usable else "not connected"):
            assert self._senders is not None
            return self._senders
        self.disconnect(is_urgent=True)  # the fleet changed because an engine died: it cannot answer
        if self._sent_before is not None:
            self._sent_before.forget()
        senders = Senders()
        self._senders, self._fleet = senders, fleet
        near, far = self._places(fleet.engines)
        if near:
            by_block = bool(self.recipients(fleet.engines).blocks)
            sender = TensorSender(fleet.only(near), self._ranks, timeout_s=self._timeout_s, by_block=by_block)
            senders.add(sender)

        def connect() -> None:
            # a new name each time: an engine may still be in the old group
            name = f"slime-pp_{next(self._group_numbers)}"
            network = DistributedSender(fleet.only(far), group_name=name, timeout_s=self._timeout_s)
            senders.add(network)
            port = claim_ports(self._address)  # until the group is formed: other processes of this host take others
            try:
                network.connect(self._address, port.first)
            finally:
                port.release()

        if far:
            self._ranks.on_source(connect)
        return senders

    def _places(self, engines: Sequence[EngineInfo]) -> tuple[list[int], list[int]]:
        """Indices of the engines on the trainer's devices, and of all others."""
        near = [index for index, engine in enumerate(engines) if self._is_near(engine)]
        return near, [index for index in range(len(engines)) if index not in near]

    def recipients(self, engines: Sequence[EngineInfo]) -> Recipients:
        """The trainer ranks that send to one of ``engines``, and the experts that they send."""
        near, far = self._places(engines)
        if not near:
            return SOURCE
        # Not by blocks if a broadcast needs all experts on rank 0, or if ranks of an engine could leave out different
        # tensors: their buckets would no longer meet.
        if far or self._sent_before is not None or all(engine.expert_blocks == 1 for engine in engines):
            return EVERY_RANK
        blocks: list[tuple[int, int] | None] = [None] * self._ranks.size
        for engine in engines:
            for device in range(engine.num_gpus):
                number = device * engine.expert_blocks // engine.num_gpus
                blocks[engine.first_slot + device] = number, engine.expert_blocks  # type: ignore[operator]  # near
        return Recipients(blocks=tuple(blocks))

    def _is_near(self, engine: EngineInfo) -> bool:
        if not self._shares_devices or engine.first_slot is None:
            return False
        # an engine that also uses devices of other processes cannot open all weights as memory
        return engine.first_slot + engine.num_gpus <= self._ranks.size

    def disconnect(self, *, is_urgent: bool = False) -> None:
        """Leave the engines. ``is_urgent``: some may be dead, so their failure to leave is only logged."""
        senders, self._senders = self._senders, None
        if senders is None:
            return
        error = error_of(senders.disconnect)
        if error is not None:
            if not is_urgent:
                raise error
            logger.info("some engines could not leave: %s", error)


class Senders:
    """Several senders as one: some engines receive through memory, others over the network.

    After a failure of one sender the others go on: in a sender through memory, other ranks wait for this one.
    """

    def __init__(self) -> None:
        self._senders: list[ChunkSender] = []
        self._failures: dict[int, Exception] = {}

    def add(self, sender: ChunkSender) -> None:
        self._senders.append(sender)

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        self._each(lambda sender: sender.send(chunk, weight_version))

    def finish(self) -> None:
        self._each(lambda sender: sender.finish())
        for failure in self._failures.values():
            raise failure

    def _each(self, work: Callable[[ChunkSender], None]) -> None:
        for number, sender in enumerate(self._senders):
            if number not in self._failures and (error := error_of(partial(work, sender))):
                self._failures[number] = error

    def disconnect(self) -> None:
        for sender in self._senders:
            sender.disconnect()
