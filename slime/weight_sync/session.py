"""One weight update of a fleet: pause -> begin -> send -> end -> flush -> verify -> continue.

    trainer source rank                     every engine
    -------------------                     ------------
    pause_generation(abort)    ---------->  running requests end with the tokens they have, so that no response mixes
                                            two versions. The rollout sends the rest again
    begin_weight_update        ---------->  weights become writable
    send(chunk) ...            ---------->  through the sender of the engine. Other trainer ranks may send as well
    end_weight_update          ---------->  weights are final
    flush_cache                ---------->  prefixes that were computed with old weights are dropped
    verify version, root hash  <----------
    continue_generation        ---------->  requests that arrived meanwhile start on the new weights

For weights in files, ``update_weights_from_disk`` replaces begin, send and end. Every arrow has the same deadline.
``continue_generation`` is sent even if an arrow before it failed, unless the update will be retried: a failed update
never leaves engines paused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime.backends import (
    EVERY_RANK,
    EngineFleet,
    NamedTensor,
    PendingCalls,
    Place,
    Recipients,
    WeightExporter,
)
from slime.utils.errors import EngineError, EngineSilent, kept, undone
from slime.weight_sync.chunks import LEAST_BUCKET, Wants, WeightChunk, into_chunks
from slime.weight_sync.root_hash import Checksums, RootHash, RootProof

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Timeout of calls after a failure, when one of the engines may never answer.
_CLOSING_TIMEOUT_S = 60.0


class ChunkSender(Protocol):
    """One way to bring chunks to the engines."""

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        """Deliver ``chunk`` to every engine. May return before they have applied it."""

    def finish(self) -> None:
        """Return when all engines have applied everything."""

    def disconnect(self) -> None:
        """Leave the engines, also in the middle of a chunk."""


@dataclass(frozen=True)
class WeightUpdate:
    """One update.

    Attributes:
        version: number of rollouts that these weights were trained on, as decimal text. It is in every response.
        max_chunk_bytes: largest bucket sent at once. None: chosen by the free memory of the trainer's devices.
        timeout_s: seconds any one call to the engines may take.
        comes_again: the caller retries the update if an engine dies during it. A failed update then leaves the engines
            paused until the retry, because they may hold a mixture of old and new weights.
        proof: compares every tensor on every rank of the engines. None skips that.
        restores: these are the weights from before ``reset_weights``, which the engines compare with their own copy.
        continues: False leaves the engines paused after a successful update. The caller continues them.
    """

    version: str
    max_chunk_bytes: int | None
    timeout_s: float
    proof: RootProof | None = None
    comes_again: bool = False
    restores: bool = False
    continues: bool = True


class TrainerRanks:
    """The collectives between trainer ranks during an update: small Python objects over gloo, on any device.

    Rank 0 is the *source*: it alone makes the session's calls to the engines. All ranks call each method together.

    Args:
        timeout_s: longest wait for the other ranks.
    """

    def __init__(self, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._all: ProcessGroup | None = None

    @property
    def is_source(self) -> bool:
        return self.rank == 0

    def group(self, members: Sequence[int]) -> ProcessGroup | None:
        """A gloo group of ``members``. None for a single member. All ranks must pass the same members."""
        import torch.distributed as dist

        if len(members) < 2:
            return None
        # new_group is a collective of all trainer ranks, also of those that are not members
        group: ProcessGroup = dist.new_group(list(members), timeout=self._timeout, backend="gloo")
        return group

    def agree(self, problem: str | None) -> list[str]:
        """The problems of all ranks, in rank order. Empty if every rank passed None."""
        return [found for found in self.gather(problem) if found is not None]

    def from_source(self, value: Any) -> Any:
        """Broadcast the source's ``value``."""
        return self.from_first(value, self._everyone())

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        import torch.distributed as dist

        group = self._everyone()
        if group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        return values

    def on_source(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the source. Returns its result, on every rank.

        Raises its error on the source, and an EngineError with the same message on the other ranks.
        """
        result, failure = _tried(work) if self.is_source else (None, None)
        answers: list[tuple[T, Exception | None]] = [self.from_source((result, _for_others(failure)))]
        return _results(answers, failure)[0]

    def on_each(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank. Returns the results in rank order, or raises as :meth:`on_source`."""
        result, failure = _tried(work)
        return _results(self.gather((result, _for_others(failure))), failure)

    def to_source(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on the source. Empty on the others."""
        return self.to_first(value, self._everyone())

    def _everyone(self) -> ProcessGroup | None:
        if self.size > 1 and self._all is None:
            self._all = self.group(range(self.size))
        return self._all

    @staticmethod
    def from_first(value: Any, group: ProcessGroup | None) -> Any:
        """Broadcast the ``value`` of the first member of ``group``."""
        import torch.distributed as dist

        if group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=group, group_src=0)
        return values[0]

    @staticmethod
    def to_first(value: Any, group: ProcessGroup | None) -> list[Any]:
        """Gather the values of ``group`` on its first member, in rank order. Empty on the others."""
        import torch.distributed as dist

        if group is None:
            return [value]
        is_first = group.rank() == 0
        values: list[Any] | None = [None] * group.size() if is_first else None
        dist.gather_object(value, values, group=group, group_dst=0)
        return values or []


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of ``work``, or its error: other ranks wait for this one."""
    results: list[T] = []
    failure = error_of(lambda: results.append(work()))
    return (results[0] if results else None), failure


def _results(answers: Sequence[tuple[T, Exception | None]], failure: Exception | None) -> list[T]:
    """The results in ``answers``. Raises the ``failure`` of this rank, or the first one of the others."""
    for error in (failure, *(one for _, one in answers)):
        if error is not None:
            raise error
    return [result for result, _ in answers]


def _for_others(failure: BaseException | None) -> Exception | None:
    """The failure as other ranks raise it. The caller of all ranks gets the first one, and needs the silent engines."""
    if isinstance(failure, EngineSilent):
        return EngineSilent(message_of(failure), failure.urls)
    return None if failure is None else EngineError(message_of(failure))


ALONE = TrainerRanks(0, 1, timeout_s=60.0)
"""A trainer of one rank."""


@dataclass(frozen=True)
class OtherWeights:
    """A part of an exporter: the weights of ``trainer``. Derived classes write or export something else."""

    trainer: WeightExporter

    @property
    def is_weight_source(self) -> bool:
        return self.trainer.is_weight_source

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        return self.trainer.export_weights(bucket_bytes, recipients)

    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        return self.trainer.export_adapter(bucket_bytes, recipients)


def push_weights(
    fleet: EngineFleet,
    sender: ChunkSender,
    weights: Iterable[NamedTensor],
    update: WeightUpdate,
    ranks: TrainerRanks = ALONE,
    wants: Wants | None = None,
    root: RootHash | None = None,
) -> int:
    """Send ``weights`` to every engine of ``fleet`` and verify that they arrived.

    Called on all of the trainer's ranks with the same weights. The source calls the engines, the others only send.

    Args:
        wants: filters out tensors that every engine already has. Default: sends all.
        root: this rank's part of the checksums of ``update.proof``.

    Returns:
        Bytes sent per engine. 0 on other ranks than the source.

    Raises:
        EngineError: an engine refused, reports another version, or holds a tensor that differs. A failure of any rank
            is raised on all: a rank that went on would wait for the others in its next collective.
        DeadlineExceeded: an engine did not answer in time.
    """
    if not ranks.is_source:
        ranks.on_source(lambda: None)  # returns when the source has paused the engines
        _deliver(sender, weights, update, ranks, wants, root)
        _of_all(root, ranks)
        ranks.on_source(lambda: None)  # returns when it has verified them
        return 0
    is_awaited = True
    try:
        with paused(fleet, update):
            with _writable(fleet, update.timeout_s):
                ranks.on_source(lambda: None)
                is_awaited = False
                num_bytes = _deliver(sender, weights, update, ranks, wants, root)
                is_awaited = True
                checksums = _of_all(root, ranks)
            flush_and_verify(fleet, update, checksums)
    except BaseException as error:
        if is_awaited:
            ranks.from_source((None, _for_others(error)))
        raise
    ranks.on_source(lambda: None)
    return num_bytes


def load_files(fleet: EngineFleet, path: str, update: WeightUpdate, checksums: Checksums | None = None) -> None:
    """Make every engine of ``fleet`` load the checkpoint at ``path``, and verify it. On the source only.

    Args:
        checksums: of the tensors in the files, for ``update.proof``.
    """
    with paused(fleet, update):
        fleet.start("flush_cache", timeout_s=update.timeout_s).wait(update.timeout_s)
        loading = fleet.start("update_weights_from_disk", model_path=path, weight_version=update.version)
        loading.wait(update.timeout_s)
        flush_and_verify(fleet, update, checksums)


def error_of(work: Callable[[], object]) -> Exception | None:
    """The error of ``work``, which a rank keeps while other ranks wait for it in a collective."""
    errors: list[Exception] = []
    with kept(errors):
        work()
    return errors[0] if errors else None


def message_of(error: BaseException) -> str:
    """The message for other ranks, without a traceback that came from another process."""
    return str(getattr(error, "cause", None) or error)  # Ray's errors of tasks keep the original in ``cause``


def _deliver(
    sender: ChunkSender,
    weights: Iterable[NamedTensor],
    update: WeightUpdate,
    ranks: TrainerRanks,
    wants: Wants | None,
    root: RootHash | None,
) -> int:
    """Send everything, on every rank. Returns the bytes. Raises on every rank if one could not send."""
    num_bytes = 0
    failure: Exception | None = None
    if root is not None:
        weights = root.watch(weights)
    for chunk in into_chunks(weights, update.max_chunk_bytes or LEAST_BUCKET, wants):
        num_bytes += chunk.num_bytes
        # after a failure this rank still exhausts ``weights``: gathering them is a collective of all ranks
        if failure is None:
            failure = error_of(lambda: sender.send(chunk, update.version))  # noqa: B023 (called at once)
    failure = failure or error_of(sender.finish)
    problems = ranks.agree(None if failure is None else message_of(failure))
    if failure is not None:
        raise failure
    if problems:
        raise EngineError("; ".join(dict.fromkeys(problems)))
    return num_bytes


def _of_all(root: RootHash | None, ranks: TrainerRanks) -> Checksums | None:
    """The checksums of every rank, on the source, which raises the failure of any rank. A collective."""
    if root is None:
        return None
    found: dict[Place, Mapping[str, str]] = {}
    failure = error_of(lambda: found.update(root.checksums()))  # the source waits in to_source()
    # to the source only: the checksums of a large engine are megabytes of text
    answers = ranks.to_source((found, None if failure is None else message_of(failure)))
    if problems := [problem for _, problem in answers if problem is not None]:
        raise EngineError(f"the checksums of the weights could not be computed: {problems[0]}") from failure
    return {place: names for part, _ in answers for place, names in part.items()}


@contextmanager
def paused(fleet: EngineFleet, update: WeightUpdate) -> Iterator[None]:
    """Pause the engines. They continue after the block, also after a failure, unless ``update`` says otherwise."""

    def go_on() -> None:
        if not update.comes_again:
            after_failure(fleet, "continue_generation", update.timeout_s)

    with undone(go_on):
        fleet.start("pause_generation", mode="abort").wait(update.timeout_s)
        yield
    if update.continues:
        fleet.start("continue_generation").wait(update.timeout_s)


@contextmanager
def _writable(fleet: EngineFleet, timeout_s: float) -> Iterator[None]:
    # also if begin itself fails: it may have succeeded on other engines
    with undone(lambda: after_failure(fleet, "end_weight_update", timeout_s)):
        fleet.start("begin_weight_update").wait(timeout_s)
        yield
    fleet.start("end_weight_update").wait(timeout_s)


def after_failure(fleet: EngineFleet, verb: str, timeout_s: float) -> None:
    """Call ``verb``, but only log its failure: the caller raises the first error, which is the cause."""
    error = error_of(lambda: fleet.start(verb).wait(min(timeout_s, _CLOSING_TIMEOUT_S)))
    if error is not None:
        logger.warning("%s after a failed weight update: %s", verb, message_of(error))


def flush_and_verify(fleet: EngineFleet, update: WeightUpdate, checksums: Checksums | None = None) -> None:
    """Drop prefixes of older weights, and compare version and ``checksums``."""
    flushing = fleet.start("flush_cache", timeout_s=update.timeout_s)
    asking = fleet.start("weight_version")  # the HTTP process answers this call while the scheduler flushes
    flushing.wait(update.timeout_s)
    verify_version(fleet, asking, update)
    if update.proof is not None and checksums is not None:
        update.proof.verify(fleet, update.version, checksums, update.timeout_s)
    if update.restores:
        _verify_restored(fleet, update.timeout_s)


def verify_version(fleet: EngineFleet, asking: PendingCalls, update: WeightUpdate) -> None:
    """Compare the answers of ``asking``, to ``weight_version``, with that of ``update``."""
    for engine, version in zip(fleet.engines, asking.wait(update.timeout_s), strict=True):
        if version != update.version:
            raise EngineError(
                f"engine {engine.url} reports weight version {version!r} after an update to {update.version!r}: "
                "the new weights did not arrive."
            )


def _verify_restored(fleet: EngineFleet, timeout_s: float) -> None:
    try:
        fleet.start("compare_weights").wait(timeout_s)
    except EngineError as error:
        raise EngineError(
            "--check-weight-update-equal: after the first sync an engine does not hold the weights of the checkpoint "
            f"that it was started with: {message_of(error)}"
        ) from error
