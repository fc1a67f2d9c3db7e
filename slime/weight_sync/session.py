"""One weight update of a fleet: pause -> begin -> send -> end -> flush -> verify -> continue, whatever happens.

    trainer source rank                     every engine
    -------------------                     ------------
    pause_generation(abort)    ---------->  running requests end with what they have: no response is a mixture of
                                            weights, whoever wants the rest sends it again
    begin_weight_update        ---------->  weights become writable
    send(chunk) ...            ---------->  same HTTP call on all, then one broadcast from rank 0
    end_weight_update          ---------->  weights are final
    flush_cache                ---------->  no prefix computed with old weights survives
    verify version, checksums  <----------
    continue_generation        ---------->  requests that came meanwhile start on the new weights

Nobody else may wait in between: every arrow has the same deadline, and ``continue_generation`` is sent even when an
arrow before it failed, so that a failed update never leaves engines paused, unless the update comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from slime.backends.protocols import EngineFleet, NamedTensor
from slime.utils.errors import EngineError
from slime.weight_sync.chunks import WeightChunk, into_chunks

__all__ = ["ChunkSender", "WeightUpdate", "push_weights"]

Checksums = Callable[[Iterable[NamedTensor]], Mapping[str, str]]


class ChunkSender(Protocol):
    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        """Deliver ``chunk`` to every engine; returns when all engines have applied it."""


@dataclass(frozen=True)
class WeightUpdate:
    """What is pushed.

    Attributes:
        version: how many rollouts these weights were trained on, as decimal text; engines stamp it on every response.
        max_chunk_bytes: largest bucket sent at once.
        timeout_s: seconds any one call to the engines may take.
        comes_again: the caller sends the update once more when an engine dies of it. Then a failed one leaves the
            engines paused: they may hold a mixture of old and new weights until the next one.
        checksums: engine-side tensor name -> checksum for the tensors that were sent, or None to skip that check.
    """

    version: str
    max_chunk_bytes: int
    timeout_s: float
    checksums: Checksums | None = None
    comes_again: bool = False


def push_weights(fleet: EngineFleet, sender: ChunkSender, weights: Iterable[NamedTensor], update: WeightUpdate) -> int:
    """Send ``weights`` to every engine of ``fleet`` and verify that they arrived. Returns the bytes sent per engine.

    Raises:
        EngineError: an engine refused, reports another version, or holds a tensor that differs.
        DeadlineExceeded: an engine did not answer in time.
    """
    num_bytes = 0
    sent: list[NamedTensor] = []
    with _paused(fleet, update):
        with _writable(fleet, update.timeout_s):
            for chunk in into_chunks(weights, update.max_chunk_bytes):
                sender.send(chunk, update.version)
                num_bytes += chunk.num_bytes
                if update.checksums is not None:
                    sent.extend(chunk.tensors)
        fleet.start("flush_cache", timeout_s=update.timeout_s).wait(update.timeout_s)
        _verify_version(fleet, update)
        if update.checksums is not None:
            _verify_checksums(fleet, update.checksums(sent), update.timeout_s)
    return num_bytes


@contextmanager
def _paused(fleet: EngineFleet, update: WeightUpdate) -> Iterator[None]:
    try:
        fleet.start("pause_generation", mode="abort").wait(update.timeout_s)
        yield
    except BaseException:
        if not update.comes_again:
            fleet.start("continue_generation").wait(update.timeout_s)
        raise
    fleet.start("continue_generation").wait(update.timeout_s)


@contextmanager
def _writable(fleet: EngineFleet, timeout_s: float) -> Iterator[None]:
    fleet.start("begin_weight_update").wait(timeout_s)
    try:
        yield
    finally:
        fleet.start("end_weight_update").wait(timeout_s)


def _verify_version(fleet: EngineFleet, update: WeightUpdate) -> None:
    for engine, version in zip(fleet.engines, fleet.start("weight_version").wait(update.timeout_s), strict=True):
        if version != update.version:
            raise EngineError(
                f"engine {engine.url} reports weight version {version!r} after an update to {update.version!r}: "
                "the new weights did not arrive."
            )


def _verify_checksums(fleet: EngineFleet, expected: Mapping[str, str], timeout_s: float) -> None:
    for engine, actual in zip(fleet.engines, fleet.start("weights_checksum").wait(timeout_s), strict=True):
        wrong = [name for name, checksum in expected.items() if actual.get(name) != checksum]
        if wrong:
            raise EngineError(
                f"--check-weight-update-equal: {len(wrong)} of {len(expected)} tensors of engine {engine.url} differ "
                f"from the trainer's, the first is {wrong[0]}."
            )
