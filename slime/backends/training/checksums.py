"""Checksums of a checkpoint's files: taken by the rank that wrote a file, shared among the ranks that read.

XXH3 with 128 bits, over the file as it lies on disk. A file is read in blocks, right after it was written or right
before it is loaded: its bytes are in the page cache then, and no tensor is held twice. Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK_BYTES = 4 * 1024**2
_MAX_THREADS = 8
# ``__3_0.distcp`` and ``rng_00003.pt`` are files of rank 3
_WRITER = re.compile(r"(?:__|rng_)(\d+)\D.*")


def checksum(path: Path) -> str:
    import xxhash  # not at the top: trainers run on machines without it until they save

    hasher = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK_BYTES))
    # unbuffered: readinto() fills the block without another copy
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.hexdigest()


def checksums_of(files: Iterable[Path]) -> dict[str, str]:
    """File name -> checksum. Several files at a time."""
    paths = list(files)
    with _threads() as pool:
        return dict(zip((path.name for path in paths), pool.map(checksum, paths), strict=True))


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "checksum")


def written_by(directory: Path, rank: int) -> list[Path]:
    """The files of ``directory`` that ``rank`` wrote, by their names."""
    return [path for path in sorted(directory.iterdir()) if _writer(path.name) == rank]


def find_damage(directory: Path, checksums: Mapping[str, str], rank: int = 0, world_size: int = 1) -> list[str]:
    """Compare this rank's share of ``directory``. Returns one phrase per damaged file.

    A rank gets the files that the rank of the same number wrote. A file without a writer goes by its position.
    """
    # at the same layout a rank loads most tensors from the files that it wrote: storage is read once
    names = [name for index, name in enumerate(sorted(checksums)) if _share(name, index) % world_size == rank]
    with _threads() as pool:
        damage = pool.map(lambda name: _damage(directory / name, checksums[name]), names)
        return [text for text in damage if text is not None]


def _damage(path: Path, expected: str) -> str | None:
    try:
        actual = checksum(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if actual == expected else f"{path.name} has the checksum {actual} instead of {expected}"


def _writer(name: str) -> int | None:
    named = _WRITER.fullmatch(name)
    return int(named.group(1)) if named else None


def _share(name: str, index: int) -> int:
    writer = _writer(name)
    return index if writer is None else writer
