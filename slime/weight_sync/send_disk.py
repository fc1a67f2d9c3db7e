"""Weights through files: the trainer writes a version into a directory that everyone sees, engines load it from there.

    trainer ranks   write the version | hook |                                       | delete older ones
    engine hosts                             | pull a copy of their own (optional)   |
    engines         generate ............................. | pause, flush, load, verify, continue

Engines stop for the last part only. Needs no network between trainer and engines, nor a common device. With
``--update-weight-mode delta`` a version holds what has changed since the one before: ``send_delta``.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slime.backends.protocols import EngineFleet, NamedTensor, WeightExporter
from slime.utils.errors import EngineError
from slime.weight_sync.ranks import TrainerRanks
from slime.weight_sync.session import WeightUpdate, load_files, message_of
from slime.weight_sync.tensor_files import checksum_function, checksums_of, content_hash
from slime.weight_sync.version_store import Manifest, VersionStore, version_path

__all__ = ["DiskSettings", "DiskUpdater"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PostWrite = Callable[[str, EngineFleet], None]


@dataclass(frozen=True)
class DiskSettings:
    """
    Attributes:
        root: directory that trainer and engine hosts share.
        local: directory on each engine host for a copy of its own; None: engines load from ``root``.
        keeps_files: never delete a version.
        checksum: name of the function over each tensor's bytes.
        post_write: called on every trainer rank with a version's directory and the fleet, when it has been written.
    """

    root: Path
    local: Path | None = None
    keeps_files: bool = False
    checksum: str = "xxh3-128"
    post_write: PostWrite | None = None


class DiskUpdater:
    """Sends full versions. Every rank of the trainer has one and calls it at the same time."""

    changed_share: float | None = None

    def __init__(self, ranks: TrainerRanks, settings: DiskSettings) -> None:
        self._ranks = ranks
        self._settings = settings
        self._store = VersionStore(settings.root)
        self._lineage = ""
        self._published: int | None = None

    def update(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        """Publish the live weights, and make every engine load them. Returns the bytes written, on the source.

        A version that has been published before is only loaded: engines that start again get what the others have.

        Raises:
            EngineError: the files could not be written, or an engine did not load them.
            DeadlineExceeded: an engine did not answer in time.
        """
        version = int(update.version)
        num_bytes = 0
        if self._published != version:
            num_bytes = self._publish(version, trainer)
            self._after_write(version, fleet)
            self._published = version
        if self._settings.local is not None:
            self._bring(fleet, version, trainer, update.timeout_s)
        sent = list(trainer.export_weights(update.max_chunk_bytes)) if update.checksums is not None else []
        if self._ranks.is_source:
            self._load(fleet, version, update, sent)
            if not self._settings.keeps_files:
                self._store.prune(self._needed(version))
        return num_bytes

    def disconnect(self) -> None:
        """There is no connection."""

    def _publish(self, version: int, trainer: WeightExporter) -> int:
        return self._publish_full(version, trainer)

    def _publish_full(self, version: int, trainer: WeightExporter) -> int:
        """Write all weights as ``version``; the first of a lineage that deltas may continue."""
        if not self._lineage:
            self._on_source(lambda: self._store.open(keeps_files=self._settings.keeps_files))
        self._lineage = self._ranks.from_source(uuid.uuid4().hex)
        folder = self._on_source(lambda: self._store.begin(version))
        trainer.save_hf(str(folder))
        return self._on_source(lambda: self._commit_full(folder, version))

    def _commit_full(self, folder: Path, version: int) -> int:
        checksums = checksums_of(folder, checksum_function(self._settings.checksum))
        content = content_hash(checksums)
        manifest = Manifest(version, self._lineage, self._settings.checksum, checksums, content=content)
        final = self._store.commit(folder, manifest)
        logger.info("weight version %d has content %s: %s", version, content, final)
        return sum(file.stat().st_size for file in final.iterdir())

    def _after_write(self, version: int, fleet: EngineFleet) -> None:
        """Let the user's function see the version on every rank, before any engine does."""
        problem: Exception | None = None
        if self._settings.post_write is not None:
            try:
                self._settings.post_write(str(version_path(self._settings.root, version)), fleet)
            except Exception as error:
                problem = error
        problems = self._ranks.agree(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        if problems:
            raise EngineError(f"--custom-update-weight-post-write-path: {'; '.join(dict.fromkeys(problems))}")

    def _bring(self, fleet: EngineFleet, version: int, trainer: WeightExporter, timeout_s: float) -> None:
        """Bring the copies of all engine hosts to ``version``, while engines still generate."""
        self._on_source(lambda: self._pull(fleet, version, timeout_s))

    def _pull(self, fleet: EngineFleet, version: int, timeout_s: float) -> None:
        root, local = str(self._settings.root), str(self._settings.local)
        fleet.start("pull_weights", source_dir=root, local_dir=local, version=version).wait(timeout_s)

    def _load(self, fleet: EngineFleet, version: int, update: WeightUpdate, sent: list[NamedTensor]) -> None:
        path = self._settings.local or version_path(self._settings.root, version)
        try:
            load_files(fleet, str(path), update, sent)
        except EngineError as error:
            flag = (
                "--update-weight-disk-dir" if self._settings.local is None else "--update-weight-local-checkpoint-dir"
            )
            raise EngineError(
                f"{message_of(error)} (Weights are at {path}, {flag}: every engine's host needs it.)"
            ) from error

    def _needed(self, version: int) -> set[int]:
        """Versions that a host which starts now must find; an engine that starts again loads the newest."""
        return {version}

    def _on_source(self, work: Callable[[], _T]) -> _T:
        """Do something on the source and tell the others what came of it. A meeting of all ranks.

        Returns what it returned, everywhere; raises what it raised on the source, and its message elsewhere.
        """
        result: _T | None = None
        failure: Exception | None = None
        if self._ranks.is_source:
            try:
                result = work()
            except Exception as error:
                failure = error
        told = self._ranks.from_source((result, None if failure is None else message_of(failure)))
        if failure is not None:
            raise failure
        if told[1] is not None:
            raise EngineError(told[1])
        return told[0]  # type: ignore[no-any-return]
