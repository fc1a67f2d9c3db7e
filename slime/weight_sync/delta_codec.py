"""The difference between two states of a tensor as few bytes, and back.

    xor         the bits that differ. Applying it twice undoes it.
    overwrite   the new values of the bytes that differ. Applying it twice is the same as once.

Either is a list of the bytes that differ:

    b"s" zstd( width u8 | count u56 | gaps, count x width bytes | values, count x u8 )

A gap is the distance from the byte before in the list, the first one from 0. All have the smallest width of 1, 2, 4 and
8 bytes that holds the largest. Numbers are little-endian. If the list would be longer than the tensor, xor is

    b"d" zstd( new ^ old over all bytes )

Pure functions over bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
import zstandard

from slime.utils.errors import EngineError
from slime.weight_sync.tensor_files import Bytes

Encoding: TypeAlias = Literal["xor", "overwrite"]
_Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_LEVEL = 1
_LINE = 64
# Work goes block by block: page faults of a buffer as large as the tensor would cost more than all other work.
# Smaller blocks make threads wait for each other, because every numpy call takes the GIL once.
_BLOCK = 1 << 24
_HEADER = 8
_SPARSE, _DENSE = b"s", b"d"
_WIDTHS = (1, 2, 4, 8)


def encode_delta(new: Bytes, old: Bytes, encoding: Encoding) -> tuple[bytes, int] | None:
    """(Compressed difference, number of bytes that differ). None when nothing has changed.

    Args:
        new, old: uint8 [n], the same length.
    """
    if new.shape != old.shape:
        raise AssertionError(f"a tensor of {old.size} bytes has become one of {new.size}")
    gaps: list[np.ndarray[Any, Any]] = []
    values: list[Bytes] = []
    last = 0
    for begin, difference in _differences(new, old):
        where = _nonzero(difference)
        if where.size:
            # gaps continue from the last position of the block before
            gap = np.diff(where, prepend=last - begin)
            gaps.append(gap.astype(np.min_scalar_type(int(gap.max()))))  # narrow while it is in the cache
            # indexing copies, which it must: the memory of the block is used again
            values.append(difference[where] if encoding == "xor" else new[begin : begin + difference.size][where])
            last = begin + int(where[-1])
    if not gaps:
        return None
    count = sum(gap.size for gap in gaps)
    width = max(gap.itemsize for gap in gaps)
    # only xor has a dense form, in which 0 means unchanged
    if encoding == "xor" and count * (width + 1) > new.size:
        return _DENSE + _dense(new, old), count
    # little-endian: the width is the first byte
    header = (count << 8 | width).to_bytes(_HEADER, "little")
    plain = b"".join((header, np.concatenate(gaps, dtype=f"<u{width}").tobytes(), *(part.data for part in values)))
    return _SPARSE + zstandard.ZstdCompressor(level=_LEVEL).compress(plain), count


def _differences(new: Bytes, old: Bytes) -> Iterator[tuple[int, Bytes]]:
    """(Offset, ``new ^ old`` from there on) block by block. The next block overwrites the array."""
    memory = np.empty(min(_BLOCK, new.size), dtype=np.uint8)
    for begin in range(0, new.size, _BLOCK):
        end = min(begin + _BLOCK, new.size)
        yield begin, np.bitwise_xor(new[begin:end], old[begin:end], out=memory[: end - begin])


def _dense(new: Bytes, old: Bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=new.size)
    # each block is compressed before the next one overwrites its memory
    parts = [compressor.compress(difference.data) for _, difference in _differences(new, old)]
    return b"".join([*parts, compressor.flush()])


def _nonzero(data: Bytes) -> _Positions:
    """``np.flatnonzero`` for mostly zeros, several times as fast: searches lines of 8 words, then words, then bytes."""
    # numpy's loop for up to 10 % true values has a mispredicted branch per value, its loop for more has none. In a
    # line or word that is not zero, more than a tenth of the parts is not zero
    end = data.size // _LINE * _LINE
    words = data[:end].view(np.uint64)
    lines = (words != 0).view(np.uint64)
    found = _within(lines, np.flatnonzero(lines != 0))
    tail = end + np.flatnonzero(data[end:])
    return np.concatenate([_within(words, found), tail])


def _within(groups: np.ndarray[Any, np.dtype[np.uint64]], which: _Positions) -> _Positions:
    """Positions of the nonzero bytes in groups of eight."""
    inside = np.flatnonzero(groups[which].view(np.uint8) != 0)
    found: _Positions = (which[inside >> 3] << 3) + (inside & 7)
    return found


def apply_delta(target: Bytes, packed: bytes | memoryview, encoding: Encoding) -> None:
    """Change ``target`` in place from the old to the new state.

    Raises:
        EngineError: ``packed`` is damaged, or belongs to a tensor of another size. ``target`` may be half changed.
    """
    form, compressed = bytes(packed[:1]), packed[1:]
    try:
        if form == _DENSE and encoding == "xor":
            _flip_all(target, compressed)
        elif form == _SPARSE:
            positions, values = _changes(_unpacked(compressed, target.size), target.size)
            match encoding:
                case "xor":
                    # ^= by index changes a repeated position only once: positions of a delta are distinct
                    target[positions] ^= values
                case "overwrite":
                    target[positions] = values
                case _:
                    raise AssertionError(f"unknown encoding {encoding}")
        else:
            raise EngineError(f"a weight delta is damaged: it begins with {form!r}")
    except zstandard.ZstdError as error:
        raise EngineError(f"a weight delta is damaged: {error}") from None


def _unpacked(compressed: bytes | memoryview, size: int) -> bytes:
    """Decompress the list of changes of a tensor of ``size`` bytes."""
    num_bytes = zstandard.frame_content_size(compressed)
    # a damaged header could claim terabytes: check before memory is allocated
    if num_bytes > _HEADER + size * (1 + _WIDTHS[-1]):
        raise EngineError(
            f"a weight delta is damaged, or of another tensor: its {num_bytes} bytes do not fit one of {size} bytes"
        )
    return zstandard.ZstdDecompressor().decompress(compressed)


def _changes(plain: bytes, size: int) -> tuple[_Positions, Bytes]:
    """(positions, values) of the changed bytes in a tensor of ``size`` bytes."""
    header = int.from_bytes(plain[:_HEADER], "little")
    width, count = header & 0xFF, header >> 8
    if width not in _WIDTHS or len(plain) != _HEADER + count * (width + 1):
        raise EngineError(f"a weight delta of {len(plain)} bytes is too short or too long for {count} changes")
    gaps = np.frombuffer(plain, dtype=f"<u{width}", count=count, offset=_HEADER)
    positions = np.cumsum(gaps, dtype=np.int64)
    if count and int(positions[-1]) >= size:
        raise EngineError(f"a weight delta changes byte {int(positions[-1])} of a tensor of {size}")
    return positions, np.frombuffer(plain, dtype=np.uint8, offset=_HEADER + count * width)


def _flip_all(target: Bytes, packed: bytes | memoryview) -> None:
    """xor a whole tensor, block by block: a decompressed block is still in the CPU's cache."""
    reader = zstandard.ZstdDecompressor().stream_reader(packed)
    block = np.empty(_BLOCK, dtype=np.uint8)
    begin = 0
    while count := reader.readinto(block.data):
        part = target[begin : begin + count]
        if part.size < count:
            break  # more bytes than the tensor has: count is not 0, and the error below is raised
        np.bitwise_xor(part, block[:count], out=part)
        begin += count
    if count or begin != target.size:
        raise EngineError(
            f"a weight delta is damaged, or of another tensor: it does not fit one of {target.size} bytes"
        )
