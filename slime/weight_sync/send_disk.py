"""Sends weights through files: the trainer writes a version to a shared directory, and the engines load it.

    trainer ranks   write the version | hook |                                       | delete older ones
    engine hosts                             | pull a local copy (optional)          |
    engines         generate ............................. | pause, flush, load, verify, continue

Engines stop for the last part only. Trainer and engines need neither a common network nor a common device.

With ``--update-weight-mode delta`` most versions hold only the difference from the version before:

    version 0   full: a complete checkpoint, the weights of this run, whatever weights the engines started with
    version 1   delta on 0
    ...
    version n   full again, when the deltas together are as large as a full version, or too many

The copy of each host is updated version by version (``local_checkpoint``). A new host starts with the newest full
version. Up to 32 trainer ranks keep the bytes of the last version in host memory to compare with, each a share of the
tensors: all together as much as the checkpoint of the engines has on disk. After an error in a delta, or if a host
cannot apply it, the next version is a full one.
"""

from __future__ import annotations

import heapq
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from slime.backends import SOURCE, EngineFleet, WeightExporter
from slime.utils.errors import EngineError
from slime.utils.memory_utils import bytes_of
from slime.weight_sync.delta_codec import Encoding, encode_delta
from slime.weight_sync.root_hash import Checksums, places_of
from slime.weight_sync.session import TrainerRanks, WeightUpdate, error_of, load_files, message_of
from slime.weight_sync.tensor_files import (
    Bytes,
    Span,
    checksum_function,
    checksums_of,
    content_hash,
    open_bytes,
    spans_of,
    threads,
)
from slime.weight_sync.version_store import Manifest, VersionStore, version_path

logger = logging.getLogger(__name__)

PostWrite = Callable[[str, EngineFleet], None]


@dataclass(frozen=True)
class DiskSettings:
    """The settings of both updaters.

    Attributes:
        root: directory that trainer and engine hosts share.
        local: directory on each engine host for a local copy. None: engines load from ``root``.
        keeps_files: never delete a version.
        checksum: name of the function over each tensor's bytes.
        post_write: called on every trainer rank with the directory of each written version and the fleet.
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

        A version that is already published is only loaded: restarted engines get the weights of the others.

        Raises:
            EngineError: the files could not be written, or an engine did not load them.
            DeadlineExceeded: an engine did not answer in time.
        """
        version = int(update.version)
        num_bytes = 0
        if self._published != version:
            num_bytes = self._publish(version, trainer)
            self._after_write(version, fleet)
            # last: if the user's function fails, the next attempt writes the version again
            self._published = version
        if self._settings.local is not None:
            self._bring(fleet, version, trainer, update.timeout_s)
        # a second export: the tensors that save_hf wrote are gone, and files may be on a slow disk
        root = None if update.proof is None else update.proof.begin(places_of(fleet.engines, (), self._ranks.rank))
        for _ in () if root is None else root.watch(trainer.export_weights(recipients=SOURCE)):
            pass  # a collective: all ranks export, although only the source hashes

        def load() -> None:
            self._load(fleet, version, update, None if root is None else root.checksums())
            if not self._settings.keeps_files:
                # after the load: until then an engine may still read an older version
                self._store.prune(self._needed(version))

        self._ranks.on_source(load)
        return num_bytes

    def disconnect(self) -> None:
        """Nothing to do: files need no connection."""

    def _publish(self, version: int, trainer: WeightExporter) -> int:
        """Write all weights as ``version``, the first of a lineage. Returns its bytes, on every rank."""
        if not self._lineage:
            self._ranks.on_source(lambda: self._store.open(keeps_files=self._settings.keeps_files))
        # a new lineage: no host may apply deltas of this version to another one
        self._lineage = self._ranks.from_source(uuid.uuid4().hex)
        folder = self._ranks.on_source(lambda: self._store.begin(version))
        trainer.save_hf(str(folder))
        checksums = self._checksums_of(folder)
        return self._ranks.on_source(lambda: self._commit_full(folder, version, checksums))

    def _checksums_of(self, folder: Path) -> dict[str, str]:
        """The checksums of all tensors. Each rank that sees the files reads some: in part those that it wrote."""
        readers = self._readers(folder)

        def read() -> dict[str, str]:
            if self._ranks.rank not in readers:
                return {}
            share = sorted(_sizes(folder))[readers.index(self._ranks.rank) :: len(readers)]
            return checksums_of(folder, checksum_function(self._settings.checksum), share)

        return {name: checksum for part in self._ranks.on_each(read) for name, checksum in part.items()}

    def _readers(self, folder: Path) -> list[int]:
        """The ranks that see the files of ``folder``. A collective."""
        listed = self._ranks.on_source(lambda: _sizes(folder))
        return [rank for rank, sees in enumerate(self._ranks.gather(_sizes(folder) == listed)) if sees]

    def _commit_full(self, folder: Path, version: int, checksums: dict[str, str]) -> int:
        content = content_hash(checksums)
        manifest = Manifest(version, self._lineage, self._settings.checksum, checksums, content=content)
        final = self._store.commit(folder, manifest)
        logger.info("weight version %d has content %s: %s", version, content, final)
        return sum(file.stat().st_size for file in final.iterdir())

    def _after_write(self, version: int, fleet: EngineFleet) -> None:
        """Call the user's function on every rank, before any engine loads the version."""
        post_write = self._settings.post_write or (lambda path, fleet: None)
        problem = error_of(lambda: post_write(str(version_path(self._settings.root, version)), fleet))
        problems = self._ranks.agree(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem  # with the traceback of the user's function
        if problems:
            raise EngineError(f"--custom-update-weight-post-write-path: {'; '.join(dict.fromkeys(problems))}")

    def _bring(self, fleet: EngineFleet, version: int, trainer: WeightExporter, timeout_s: float) -> None:
        self._ranks.on_source(lambda: self._pull(fleet, version, timeout_s))

    def _pull(self, fleet: EngineFleet, version: int, timeout_s: float) -> None:
        """Update the copies of all engine hosts to ``version`` while engines still generate."""
        root, local = str(self._settings.root), str(self._settings.local)
        fleet.start("pull_weights", source_dir=root, local_dir=local, version=version).wait(timeout_s)

    def _load(self, fleet: EngineFleet, version: int, update: WeightUpdate, checksums: Checksums | None) -> None:
        path = self._settings.local or version_path(self._settings.root, version)
        try:
            load_files(fleet, str(path), update, checksums)
        except EngineError as error:
            flag = (
                "--update-weight-disk-dir" if self._settings.local is None else "--update-weight-local-checkpoint-dir"
            )
            raise EngineError(
                f"{message_of(error)} (Weights are at {path}, {flag}: every engine's host needs it.)"
            ) from error

    def _needed(self, version: int) -> set[int]:
        """Versions that must stay on disk for hosts that start now. A restarted engine loads the newest."""
        return {version}


def _sizes(folder: Path) -> dict[str, int]:
    """The safetensors files of ``folder``. Empty if this host does not see it."""
    return {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}


# Most deltas on one full version. A new host has to apply all of them.
_MAX_DELTAS = 32
# Ranks that compare. A delta has a file of each.
_MAX_KEEPERS = 32


@dataclass(frozen=True)
class _Changes:
    """The changes that a rank has found in its share.

    Attributes:
        exported, compared: tensors of the trainer, and those in the share.
        total, changed: bytes of the share.
        checksums: of the changed ones.
        file: name and size of the file that holds the changes. None without any.
    """

    exported: int
    compared: int
    total: int
    changed: int
    checksums: dict[str, str]
    file: tuple[str, int] | None


class DeltaUpdater(DiskUpdater):
    """Sends a full version first, then differences. See :class:`DiskUpdater`."""

    def __init__(self, ranks: TrainerRanks, settings: DiskSettings, *, encoding: Encoding) -> None:
        super().__init__(ranks, settings)
        assert settings.local is not None, "deltas need --update-weight-local-checkpoint-dir"
        self._encoding: Encoding = encoding
        self._checksum = checksum_function(settings.checksum)
        # The share of this rank in the last version. None: the next version is a full one.
        self._last: dict[str, Bytes] | None = None
        self._chain: list[int] = []
        self._full_bytes = 0
        self._delta_bytes = 0

    def _publish(self, version: int, trainer: WeightExporter) -> int:
        # one rank without its share is enough
        has_lost = bool(self._ranks.agree("no last version" if self._last is None else None))
        if has_lost or len(self._chain) > _MAX_DELTAS or self._delta_bytes >= self._full_bytes:
            return self._publish_full(version, trainer)
        return self._publish_delta(version, trainer)

    def _publish_full(self, version: int, trainer: WeightExporter) -> int:
        self._last = None  # if the write fails, the next version is a full one too
        self.changed_share = None
        num_bytes = super()._publish(version, trainer)
        folder = version_path(self._settings.root, version)
        readers = self._readers(folder)
        keepers = readers[:: -(-len(readers) // _MAX_KEEPERS)]  # at equal distances: on different hosts

        def keep() -> dict[str, Bytes]:
            if self._ranks.rank not in keepers:
                return {}
            share = _share(spans_of(folder), len(keepers), keepers.index(self._ranks.rank))
            with open_bytes(share) as arrays:
                # a copy: the arrays are views of files that will be deleted
                return {name: np.array(array) for name, array in arrays.items()}

        last: dict[str, Bytes] = {}
        self._ranks.on_each(lambda: last.update(keep()))
        self._last = last
        self._chain, self._full_bytes, self._delta_bytes = [version], num_bytes, 0
        return num_bytes

    def _publish_delta(self, version: int, trainer: WeightExporter) -> int:
        """Write the changes since the last version, and keep the new state."""
        assert self._last is not None, "_publish sends a full version otherwise"
        last, self._last = self._last, None  # a failure on the way leaves nothing to compare with
        folder = self._ranks.on_source(lambda: self._begin_delta(version))
        found = self._ranks.on_each(lambda: self._write_changes(folder, last, trainer))
        num_bytes = self._ranks.on_source(lambda: self._commit_delta(folder, version, found))
        total, changed = sum(one.total for one in found), sum(one.changed for one in found)
        if self._ranks.is_source:
            text = "weight version %d: %d of %d bytes have changed, %d written"
            logger.info(text, version, changed, total, num_bytes)
            self.changed_share = changed / total
        self._last = last
        self._chain.append(version)
        self._delta_bytes += num_bytes
        return num_bytes

    def _begin_delta(self, version: int) -> Path:
        folder = self._store.begin(version)
        folder.mkdir()
        return folder

    def _write_changes(self, folder: Path, last: dict[str, Bytes], trainer: WeightExporter) -> _Changes:
        """Compare the live weights with ``last``, which gets the new state. Writes a file of the changes."""
        packed: dict[str, Bytes] = {}
        checksums: dict[str, str] = {}
        num_tensors = num_changed = 0
        weights = iter(trainer.export_weights())  # every rank gets every tensor, as for the files of a full version
        try:
            with threads() as pool:
                work: list[tuple[str, Future[tuple[bytes, int, str] | None]]] = []
                for name, tensor in weights:
                    num_tensors += 1
                    if name in last:
                        work.append((name, self._start(pool, last[name], tensor)))
                for name, future in work:
                    if (change := future.result()) is not None:
                        packed[name] = np.frombuffer(change[0], dtype=np.uint8)
                        num_changed += change[1]
                        checksums[name] = change[2]
        finally:
            for _ in weights:  # a rank that failed, too: the others wait for it at every tensor
                pass
        total = sum(array.size for array in last.values())
        file = folder / f"delta-{self._ranks.rank:05d}.safetensors"
        if packed:
            save_file(packed, file)
        place = (file.name, file.stat().st_size) if packed else None
        return _Changes(num_tensors, len(work), total, num_changed, checksums, place)

    def _start(
        self, pool: ThreadPoolExecutor, last: Bytes, tensor: torch.Tensor
    ) -> Future[tuple[bytes, int, str] | None]:
        """Compare in a thread while the next tensors are gathered. ``last`` is overwritten with the new state."""
        new = bytes_of(tensor)

        def compare() -> tuple[bytes, int, str] | None:
            encoded = encode_delta(new, last, self._encoding)
            if encoded is None:
                return None
            np.copyto(last, new)
            return *encoded, self._checksum(new)

        return pool.submit(compare)

    def _commit_delta(self, folder: Path, version: int, found: Sequence[_Changes]) -> int:
        compared, exported = sum(one.compared for one in found), found[0].exported
        if compared != exported:
            raise EngineError(
                f"weight version {version}: {compared} tensors were compared, but the trainer exports {exported}. The "
                "next version is sent in full."
            )
        written = dict(one.file for one in found if one.file is not None)
        if (seen := _sizes(folder)) != written:
            raise EngineError(f"{folder} has the files {seen} instead of {written}, which the trainer ranks wrote.")
        manifest = Manifest(
            version,
            self._lineage,
            self._settings.checksum,
            {name: checksum for one in found for name, checksum in one.checksums.items()},
            base=self._chain[-1],
            encoding=self._encoding,
        )
        final: Path = self._store.commit(folder, manifest)
        return sum(file.stat().st_size for file in final.iterdir())

    def _bring(self, fleet: EngineFleet, version: int, trainer: WeightExporter, timeout_s: float) -> None:
        problem = self._ranks.on_source(lambda: self._pull_problem(fleet, version, timeout_s))
        if problem is None:
            return
        logger.warning("weight version %d is sent in full, a host cannot follow: %s", version, problem)
        self._publish_full(version, trainer)
        self._after_write(version, fleet)
        super()._bring(fleet, version, trainer, timeout_s)

    def _pull_problem(self, fleet: EngineFleet, version: int, timeout_s: float) -> str | None:
        """The reason why a host could not apply a delta. Raises errors that a full version would not fix."""
        try:
            self._pull(fleet, version, timeout_s)
        except EngineError as error:
            if len(self._chain) == 1:
                raise  # a full version: another one would fail in the same way
            return message_of(error)
        return None

    def _needed(self, version: int) -> set[int]:
        return set(self._chain)  # a new host applies all deltas to the full version


def _share(spans: Mapping[str, Span], count: int, number: int) -> dict[str, Span]:
    """The tensors of keeper ``number`` of ``count``. All have about the same number of bytes."""
    loads = [(0, keeper) for keeper in range(count)]
    mine = {}
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin - item[1].end, item[0])):
        load, keeper = heapq.heappop(loads)
        heapq.heappush(loads, (load + span.end - span.begin, keeper))
        if keeper == number:
            mine[name] = span
    return mine
