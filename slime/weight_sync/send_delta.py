"""Weights through files, only what has changed: each version holds the difference to the one before.

    version 0   full: a complete checkpoint, the real weights of this run whatever engines started from
    version 1   delta on 0
    ...
    version n   full again, when the deltas together have become as large as a full version, or too many

A host's copy follows version by version (``local_checkpoint``); a new host begins with the newest full version. The
source rank keeps the bytes of the last version in host memory to compare with. When anything goes wrong between that
and the files, or a host cannot apply a delta, the next version is a full one.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from slime.backends.protocols import EngineFleet, WeightExporter
from slime.utils.errors import EngineError
from slime.weight_sync.delta_codec import Encoding, encode_delta
from slime.weight_sync.ranks import TrainerRanks
from slime.weight_sync.send_disk import DiskSettings, DiskUpdater
from slime.weight_sync.session import message_of
from slime.weight_sync.tensor_files import Bytes, checksum_function, open_bytes, spans_of, threads
from slime.weight_sync.version_store import Manifest, version_path

__all__ = ["DeltaUpdater"]

logger = logging.getLogger(__name__)

_MAX_DELTAS = 32
"""On one full version: what a new host has to apply."""
_FILE = "delta.safetensors"


class DeltaUpdater(DiskUpdater):
    """Sends a full version first, then differences. See :class:`DiskUpdater`."""

    def __init__(self, ranks: TrainerRanks, settings: DiskSettings, *, encoding: Encoding) -> None:
        super().__init__(ranks, settings)
        assert settings.local is not None, "deltas need --update-weight-local-checkpoint-dir"
        self._encoding: Encoding = encoding
        self._checksum = checksum_function(settings.checksum)
        self._last: dict[str, Bytes] = {}
        self._chain: list[int] = []
        self._full_bytes = 0
        self._delta_bytes = 0

    def _publish(self, version: int, trainer: WeightExporter) -> int:
        is_full = self._ranks.from_source(
            not self._last or len(self._chain) > _MAX_DELTAS or self._delta_bytes >= self._full_bytes
        )
        return self._publish_full(version, trainer) if is_full else self._publish_delta(version, trainer)

    def _publish_full(self, version: int, trainer: WeightExporter) -> int:
        self._last = {}
        self.changed_share = None
        num_bytes = super()._publish_full(version, trainer)
        if self._ranks.is_source:
            with open_bytes(spans_of(version_path(self._settings.root, version))) as arrays:
                self._last = {name: np.array(array) for name, array in arrays.items()}
        self._chain, self._full_bytes, self._delta_bytes = [version], num_bytes, 0
        return num_bytes

    def _publish_delta(self, version: int, trainer: WeightExporter) -> int:
        """Write what has changed since the last version, and remember the new state."""
        last, self._last = self._last, {}  # a failure on the way leaves nothing to compare with: the next one is full
        packed: dict[str, Bytes] = {}
        checksums: dict[str, str] = {}
        num_changed = 0
        with threads() as pool:
            work: list[tuple[str, Future[tuple[bytes, int, str] | None]]] = []
            for name, tensor in trainer.export_weights():
                if self._ranks.is_source:
                    work.append((name, self._start(pool, last[name], tensor)))
            for name, future in work:
                found = future.result()
                if found is not None:
                    packed[name] = np.frombuffer(found[0], dtype=np.uint8)
                    num_changed += found[1]
                    checksums[name] = found[2]
        num_bytes = self._on_source(lambda: self._commit_delta(version, packed, checksums))
        if self._ranks.is_source:
            total = sum(array.size for array in last.values())
            text = "weight version %d: %d of %d bytes have changed, %d written"
            logger.info(text, version, num_changed, total, num_bytes)
            self.changed_share = num_changed / total
        self._last = last
        self._chain.append(version)
        self._delta_bytes += num_bytes
        return num_bytes

    def _start(
        self, pool: ThreadPoolExecutor, last: Bytes, tensor: torch.Tensor
    ) -> Future[tuple[bytes, int, str] | None]:
        """Compare in the background, while the next tensors are gathered. ``last`` becomes the new state."""
        new = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()

        def compare() -> tuple[bytes, int, str] | None:
            encoded = encode_delta(new, last, self._encoding)
            if encoded is None:
                return None
            np.copyto(last, new)
            return *encoded, self._checksum(new)

        return pool.submit(compare)

    def _commit_delta(self, version: int, packed: dict[str, Bytes], checksums: dict[str, str]) -> int:
        folder = self._store.begin(version)
        folder.mkdir()
        save_file(packed, folder / _FILE)
        manifest = Manifest(
            version,
            self._lineage,
            self._settings.checksum,
            checksums,
            base=self._chain[-1],
            encoding=self._encoding,
        )
        final: Path = self._store.commit(folder, manifest)
        return sum(file.stat().st_size for file in final.iterdir())

    def _bring(self, fleet: EngineFleet, version: int, trainer: WeightExporter, timeout_s: float) -> None:
        problem = self._on_source(lambda: self._pull_problem(fleet, version, timeout_s))
        if problem is None:
            return
        logger.warning("weight version %d is sent in full, a host cannot follow: %s", version, problem)
        self._publish_full(version, trainer)
        self._after_write(version, fleet)
        super()._bring(fleet, version, trainer, timeout_s)

    def _pull_problem(self, fleet: EngineFleet, version: int, timeout_s: float) -> str | None:
        """Why a host could not apply a delta. What a full version would not help against is raised."""
        try:
            self._pull(fleet, version, timeout_s)
        except EngineError as error:
            if len(self._chain) == 1:
                raise
            return message_of(error)
        return None

    def _needed(self, version: int) -> set[int]:
        return set(self._chain)
