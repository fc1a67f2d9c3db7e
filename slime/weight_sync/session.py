"""One weight update of a fleet: pause -> begin -> send -> end -> flush -> verify -> continue, whatever happens.

    trainer source rank                     every engine
    -------------------                     ------------
    pause_generation(abort)    ---------->  running requests end with what they have: no response is a mixture of
                                            weights, whoever wants the rest sends it again
    begin_weight_update        ---------->  weights become writable
    send(chunk) ...            ---------->  by whichever sender the engine has; other trainer ranks may send as well
    end_weight_update          ---------->  weights are final
    flush_cache                ---------->  no prefix computed with old weights survives
    verify version, checksums  <----------
    continue_generation        ---------->  requests that came meanwhile start on the new weights

Weights in files take one call instead of begin, send and end: update_weights_from_disk. Nobody else may wait in
between: every arrow has the same deadline, and ``continue_generation`` is sent even when an arrow before it failed, so
that a failed update never leaves engines paused, unless the update comes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from slime.backends.protocols import EngineFleet, NamedTensor
from slime.utils.errors import EngineError
from slime.weight_sync.chunks import Wants, WeightChunk, into_chunks
from slime.weight_sync.ranks import ALONE, TrainerRanks

__all__ = ["ChunkSender", "WeightUpdate", "load_files", "message_of", "push_weights"]

logger = logging.getLogger(__name__)

_CLOSING_TIMEOUT_S = 60.0
"""For what follows a failure, on engines of which one may be silent for good."""

Checksums = Callable[[Iterable[NamedTensor]], Mapping[str, str]]


class ChunkSender(Protocol):
    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        """Deliver ``chunk`` to every engine; may return before they have applied it."""

    def finish(self) -> None:
        """Return when all engines have applied everything."""

    def disconnect(self) -> None:
        """Leave the engines, whatever is under way."""


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
        restores: these are the weights that the engines had before ``reset_weights``; they compare them.
        continues: False leaves the engines paused when the update has succeeded; somebody else lets them go on.
    """

    version: str
    max_chunk_bytes: int
    timeout_s: float
    checksums: Checksums | None = None
    comes_again: bool = False
    restores: bool = False
    continues: bool = True


def push_weights(
    fleet: EngineFleet,
    sender: ChunkSender,
    weights: Iterable[NamedTensor],
    update: WeightUpdate,
    ranks: TrainerRanks = ALONE,
    wants: Wants | None = None,
) -> int:
    """Send ``weights`` to every engine of ``fleet`` and verify that they arrived. Returns the bytes sent per engine.

    Called on all of the trainer's ranks with the same weights; the source holds the session, the others only send.

    Args:
        wants: leaves out tensors that every engine has already; default none.

    Raises:
        EngineError: an engine refused, reports another version, or holds a tensor that differs. On the source for all
            ranks, elsewhere for the rank's own failure.
        DeadlineExceeded: an engine did not answer in time.
    """
    if not ranks.is_source:
        problems = ranks.agree(None)
        if not problems:
            _deliver(sender, weights, update, ranks, wants)
        return 0
    has_met = False
    try:
        with _paused(fleet, update):
            with _writable(fleet, update.timeout_s):
                problems = ranks.agree(None)
                has_met = True
                assert not problems, "only the source can fail before anything is sent"
                num_bytes, sent = _deliver(sender, weights, update, ranks, wants)
            _settle(fleet, update, sent)
    except BaseException as error:
        if not has_met:
            ranks.agree(message_of(error))  # the other ranks wait for the word to begin
        raise
    return num_bytes


def load_files(fleet: EngineFleet, path: str, update: WeightUpdate, sent: Iterable[NamedTensor] = ()) -> None:
    """Make every engine of ``fleet`` load the checkpoint at ``path``, and verify it. On the source only.

    Args:
        sent: what the files hold; only read where checksums are compared.
    """
    with _paused(fleet, update):
        fleet.start("flush_cache", timeout_s=update.timeout_s).wait(update.timeout_s)
        loading = fleet.start("update_weights_from_disk", model_path=path, weight_version=update.version)
        loading.wait(update.timeout_s)
        _settle(fleet, update, sent)


def message_of(error: BaseException) -> str:
    """For the other ranks; without the traceback of another process that came with it."""
    return str(getattr(error, "cause", None) or error)


def _deliver(
    sender: ChunkSender,
    weights: Iterable[NamedTensor],
    update: WeightUpdate,
    ranks: TrainerRanks,
    wants: Wants | None,
) -> tuple[int, list[NamedTensor]]:
    """Send everything, on every rank. A rank that fails goes on gathering: the others cannot without it."""
    num_bytes = 0
    sent: list[NamedTensor] = []
    failure: Exception | None = None
    if update.checksums is not None and ranks.is_source:
        weights = _noted(weights, sent)
    for chunk in into_chunks(weights, update.max_chunk_bytes, wants):
        num_bytes += chunk.num_bytes
        if failure is None:
            try:
                sender.send(chunk, update.version)
            except Exception as error:
                failure = error
    if failure is None:
        try:
            sender.finish()
        except Exception as error:
            failure = error
    problems = ranks.agree(None if failure is None else message_of(failure))
    if failure is not None:
        raise failure
    if problems and ranks.is_source:
        raise EngineError("; ".join(dict.fromkeys(problems)))
    return num_bytes, sent


def _noted(weights: Iterable[NamedTensor], seen: list[NamedTensor]) -> Iterator[NamedTensor]:
    for named in weights:
        seen.append(named)
        yield named


@contextmanager
def _paused(fleet: EngineFleet, update: WeightUpdate) -> Iterator[None]:
    try:
        fleet.start("pause_generation", mode="abort").wait(update.timeout_s)
        yield
    except BaseException:
        if not update.comes_again:
            _after_failure(fleet, "continue_generation", update.timeout_s)
        raise
    if update.continues:
        fleet.start("continue_generation").wait(update.timeout_s)


@contextmanager
def _writable(fleet: EngineFleet, timeout_s: float) -> Iterator[None]:
    try:
        fleet.start("begin_weight_update").wait(timeout_s)
        yield
    except BaseException:  # also when it could not begin: other engines have
        _after_failure(fleet, "end_weight_update", timeout_s)
        raise
    fleet.start("end_weight_update").wait(timeout_s)


def _after_failure(fleet: EngineFleet, verb: str, timeout_s: float) -> None:
    """The engine that failed may fail at this as well; what it failed at first is what is raised."""
    try:
        fleet.start(verb).wait(min(timeout_s, _CLOSING_TIMEOUT_S))
    except Exception as error:
        logger.warning("%s after a failed weight update: %s", verb, message_of(error))


def _settle(fleet: EngineFleet, update: WeightUpdate, sent: Iterable[NamedTensor]) -> None:
    """Nothing of the old weights is left, and the new ones have arrived."""
    flushing = fleet.start("flush_cache", timeout_s=update.timeout_s)
    asking = fleet.start("weight_version")  # the HTTP process answers this one while the scheduler flushes
    flushing.wait(update.timeout_s)
    _verify_version(fleet, update, asking.wait(update.timeout_s))
    if update.checksums is not None:
        _verify_checksums(fleet, update.checksums(sent), update.timeout_s)
    if update.restores:
        _verify_restored(fleet, update.timeout_s)


def _verify_version(fleet: EngineFleet, update: WeightUpdate, versions: Sequence[str]) -> None:
    for engine, version in zip(fleet.engines, versions, strict=True):
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


def _verify_restored(fleet: EngineFleet, timeout_s: float) -> None:
    try:
        fleet.start("compare_weights").wait(timeout_s)
    except EngineError as error:
        raise EngineError(
            "--check-weight-update-equal: after the first sync an engine does not hold the weights of the checkpoint "
            f"that it was started with: {message_of(error)}"
        ) from error
