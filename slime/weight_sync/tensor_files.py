"""Finds, checks and changes the raw bytes of tensors in safetensors files.

Used by the publisher and by the local copy of each host. Handles names and bytes only, without dtypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from slime.utils.errors import ConfigError, EngineError

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
