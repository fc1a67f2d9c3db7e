"""Writes and reads the directory through which weights travel: one folder per version, complete or absent.

    <root>/.slime_weights              marks the directory as slime's: everything in it may be deleted
    <root>/.writing/weight_v000003     a version being written
    <root>/weight_v000003              a version: its files and their manifest

A folder gets its final name after everything in it is on disk. A *full* version is a Hugging Face checkpoint, a *delta*
holds the changes since the version before. Only the publisher writes.

The functions for raw bytes of tensors in safetensors files serve the publisher and the local copy of each host. They
handle names and bytes only, without dtypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

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


Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""uint8 [num_bytes]."""
Checksum: TypeAlias = Callable[[Bytes], str]

_MAX_THREADS = 16
_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself
_LENGTH = struct.Struct("<Q")
# ``MADV_POPULATE_WRITE`` of Linux, which Python has no name for
_POPULATE_WRITE = 23


@dataclass(frozen=True)
class Span:
    """The bytes of one tensor: ``file`` from ``begin`` to ``end``."""

    file: Path
    begin: int
    end: int


def spans_of(directory: Path) -> dict[str, Span]:
    """Tensor name -> its span, over all safetensors files of ``directory``.

    Raises:
        EngineError: a file is damaged or too short.
    """
    found: dict[str, Span] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            found |= _spans_in(file)
        except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
            raise EngineError(f"{file} is not a complete safetensors file: {error}") from None
    return found


def _spans_in(file: Path) -> dict[str, Span]:
    with file.open("rb") as source:
        (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
        # a damaged length could claim terabytes: check before memory is allocated
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {length} bytes")
        header = dict(json.loads(source.read(length)))
    header.pop("__metadata__", None)
    data, size = _LENGTH.size + length, file.stat().st_size
    found: dict[str, Span] = {}
    for name, entry in header.items():
        begin, end = map(int, entry["data_offsets"])
        # also the sign of a file that was cut off
        if not 0 <= begin <= end <= size - data:
            raise ValueError(f"it has {size} bytes, and the tensor {name} does not lie within them")
        found[name] = Span(file, data + begin, data + end)
    return found


@contextmanager
def open_bytes(spans: Mapping[str, Span], *, writable: bool = False) -> Iterator[dict[str, Bytes]]:
    """Tensor name -> its bytes, mapped from the file. With ``writable``, writes go to the file.

    No array may be used after the block.
    """
    arrays: dict[str, Bytes] = {}
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    with ExitStack() as stack:
        maps: dict[Path, mmap.mmap] = {}
        for name, span in spans.items():
            if span.file not in maps:
                file = stack.enter_context(span.file.open("r+b" if writable else "rb"))
                maps[span.file] = mmap.mmap(file.fileno(), 0, access=access)
            memory = maps[span.file]
            # the map lives until its last array is deleted, because a view holds a reference
            arrays[name] = np.frombuffer(memory, dtype=np.uint8, count=span.end - span.begin, offset=span.begin)
        maps.clear()
        yield arrays


def populate(array: Bytes) -> None:
    """Map the pages of a writable array at once."""
    # takes half to a third of the time of single page faults. Not mmap.madvise, which holds the GIL: tensors are
    # populated in parallel
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = array.ctypes.data + array.size - begin
    if array.size:  # fails on kernels before 5.14, which is harmless: pages are then mapped on first use
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _POPULATE_WRITE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def checksums_of(directory: Path, checksum: Checksum, files: Container[str] | None = None) -> dict[str, str]:
    """Tensor name -> checksum of its bytes, for every tensor in ``directory``, or in ``files`` there."""
    spans = {name: span for name, span in spans_of(directory).items() if files is None or span.file.name in files}
    with open_bytes(spans) as arrays, threads() as pool:
        return dict(zip(arrays, pool.map(checksum, arrays.values()), strict=True))


def checksum_function(name: str) -> Checksum:
    """The function that ``--update-weight-delta-checksum`` names.

    Raises:
        ConfigError: its library is not installed.
    """
    match name:
        case "xxh3-128":
            import xxhash

            return lambda data: str(xxhash.xxh3_128(data.data).hexdigest())
        case "blake3":
            try:
                import blake3
            except ImportError:
                raise ConfigError(
                    "--update-weight-delta-checksum blake3 needs the package blake3 (pip install blake3), on the "
                    "trainer's and the engines' hosts; or use xxh3-128."
                ) from None
            return lambda data: str(blake3.blake3(data.data).hexdigest())
        case "adler32":
            return lambda data: f"{zlib.adler32(data.data):08x}"
        case _:
            raise AssertionError(f"unknown checksum {name}")


def content_hash(checksums: Mapping[str, str]) -> str:
    """One hash of all weights: the same for the same tensors, however they are divided among files. 16 hex digits."""
    lines = "".join(f"{name} {checksum}\n" for name, checksum in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def threads() -> ThreadPoolExecutor:
    """A pool for work that releases the GIL."""
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="weights")
