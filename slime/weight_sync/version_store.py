"""Writes and reads the directory through which weights travel: one folder per version, complete or absent.

    <root>/.slime_weights              marks the directory as slime's: everything in it may be deleted
    <root>/.writing/weight_v000003     a version being written
    <root>/weight_v000003              a version: its files and their manifest

A folder gets its final name after everything in it is on disk. A *full* version is a Hugging Face checkpoint, a *delta*
holds the changes since the version before. Only the publisher writes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from slime.utils.async_utils import Deadline
from slime.utils.errors import ConfigError, EngineError
from slime.utils.files import RunLock

MANIFEST = "slime_weights.json"
_MARKER = ".slime_weights"
_WRITING = ".writing"
_READABLE = 0o644  # engines may run as another user
_LOCK_TIMEOUT_S = 60.0
_LOCK_POLL_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """The contents of a version.

    Attributes:
        lineage: the same for a full version and everything that builds on it. No two runs have the same.
        base: for a delta the version before, for a full one None.
        checksum: name of the function that ``tensors`` are checksums of.
        tensors: name -> checksum of all its bytes in this version. A delta lists changed tensors only.
        files: name -> size in bytes.
        encoding: of a delta.
        content: hash of all weights of this version, None in a delta.
    """

    version: int
    lineage: str
    checksum: str
    tensors: Mapping[str, str]
    base: int | None = None
    encoding: Literal["xor", "overwrite"] = "xor"
    content: str | None = None
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_delta(self) -> bool:
        return self.base is not None


def version_path(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a version, whose files all have the sizes it names.

    Raises:
        EngineError: the version is not there, or not complete.
    """
    try:
        manifest = Manifest(**json.loads((directory / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(f"there is no complete weight version at {directory}: {error}") from None
    # a shared file system may show a file before all of its content
    for name, size in manifest.files.items():
        file = directory / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            raise EngineError(f"{file} has {actual} bytes instead of the {size} that were written.")
    return manifest


def foreign_content(root: Path) -> str | None:
    """The reason why a publisher must not use ``root``. None if it may."""
    if (root / _MARKER).is_file() or not root.is_dir():
        return None
    strangers = sorted(path.name for path in root.iterdir())
    if not strangers:
        return None
    return (
        f"--update-weight-disk-dir {root} holds {strangers[0]!r} and was not made by slime, which deletes files there: "
        "name an empty or a new directory."
    )


class VersionStore:
    """The publisher's view. The first call must be :meth:`open`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: RunLock | None = None

    def open(self, *, keeps_files: bool) -> None:
        """Take the directory over, and delete the leftovers of an earlier run.

        Raises:
            ConfigError: it holds files that slime did not write, or another live run uses it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        if problem := foreign_content(self.root):
            raise ConfigError(problem)
        (self.root / _MARKER).write_text("slime keeps weights for its engines here, and deletes old ones.\n")
        # before anything is deleted: two runs would delete each other's versions
        self._lock = self._locked()
        shutil.rmtree(self.root / _WRITING, ignore_errors=True)
        if not keeps_files:
            self.prune(keep=())

    def _locked(self) -> RunLock:
        """Take the lock of the directory for the life of this process."""
        # a restarted trainer may have to wait until the kernel has freed the memory of the old one
        deadline = Deadline(_LOCK_TIMEOUT_S, "the lock")
        while True:
            try:
                return RunLock(self.root, f"--update-weight-disk-dir {self.root}", "Name another directory")
            except ConfigError as taken:
                if not deadline.remaining:
                    raise
                logger.info("waiting for at most %.0f s: %s", deadline.remaining, taken)
                time.sleep(min(_LOCK_POLL_S, deadline.remaining))

    def begin(self, version: int) -> Path:
        """The folder to write ``version`` to. It does not exist yet, its parent does."""
        folder = version_path(self.root / _WRITING, version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        return folder

    def commit(self, folder: Path, manifest: Manifest) -> Path:
        """Turn the folder from :meth:`begin` into a version. Replaces an earlier attempt at the same one."""
        files = [file for file in sorted(folder.iterdir()) if file.is_file()]
        for file in files:
            file.chmod(_READABLE)
        sizes = {file.name: file.stat().st_size for file in files}
        content = asdict(manifest) | {"files": sizes}
        (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
        # content before the name: after a power failure a version is complete or absent
        for path in (*files, folder / MANIFEST, folder):
            _to_disk(path)
        final = version_path(self.root, manifest.version)
        if final.exists():
            shutil.rmtree(final)  # rename() does not replace a directory with content
        folder.rename(final)
        _to_disk(self.root)
        return final

    def prune(self, keep: Container[int]) -> None:
        """Delete all versions but those in ``keep``."""
        for path in sorted(self.root.glob("weight_v*")):
            number = path.name.removeprefix("weight_v")
            if number.isdecimal() and int(number) not in keep:
                shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
