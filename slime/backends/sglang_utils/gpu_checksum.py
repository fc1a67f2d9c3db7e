"""SGLang's checksum of a tensor on a GPU, of parts that arrive one after the other.

``gpu_tensor_hash`` of SGLang 0.5.23 (kernels/ops/memory/gpu_tensor_hash.py) reads a whole tensor: the hash of each
32-bit word depends on its place, and words are added up in tiles of 8192. The sums of a tile can therefore be computed
part by part, and no rank needs the fused tensor. Each byte is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The sizes and constants are SGLang's: another value gives other checksums.
_TILE = 8192
_BLOCK = 1024
_WORD = 4
_SEED = 0x243F6A88
_SECOND_SEED = ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
_MASK = 0xFFFFFFFF
_MASK_64 = (1 << 64) - 1


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x ^= x >> 16
    x = x * tl.full((), 0x85EBCA6B, tl.uint32)
    x ^= x >> 13
    x = x * tl.full((), 0xC2B2AE35, tl.uint32)
    x ^= x >> 16
    return x


@triton.jit(do_not_specialize=["begin", "count"])  # type: ignore[untyped-decorator]
def add_words(  # type: ignore[no-untyped-def]
    words, sums, begin, count, seed1: tl.constexpr, seed2: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the hashes of ``count`` words, which begin at word ``begin`` of the tensor, to the sums of their tiles."""
    # blocks are those of the whole tensor, so none belongs to two tiles
    block = begin // BLOCK + tl.program_id(axis=0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = (place >= begin) & (place < begin + count)
    value = tl.load(words + (place - begin), mask=is_inside, other=0).to(tl.uint32, bitcast=True)
    number = place.to(tl.uint32)
    first = (number * tl.full((), 0x27D4EB2D, tl.uint32) + tl.full((), seed1, tl.uint32)) ^ (
        (number << 15) | (number >> 17)
    )
    second = (number * tl.full((), 0x165667B1, tl.uint32) + tl.full((), seed2, tl.uint32)) ^ (
        (number << 13) | (number >> 19)
    )
    zero = tl.zeros_like(value)
    # atomics have no unsigned type on every device. Signed sums wrap around to the same bits
    sum1 = tl.sum(tl.where(is_inside, _mixed(value ^ first), zero), axis=0).to(tl.int32, bitcast=True)
    sum2 = tl.sum(tl.where(is_inside, _mixed(value ^ second), zero), axis=0).to(tl.int32, bitcast=True)
    tile = block * BLOCK // TILE
    tl.atomic_add(sums + tile * 2, sum1)
    tl.atomic_add(sums + tile * 2 + 1, sum2)


class TileHash:
    """The checksum of one tensor (protocol TensorHash)."""

    def __init__(self) -> None:
        self._num_words = 0
        self._sums: torch.Tensor | None = None
        self._rest: torch.Tensor | None = None

    def add(self, tensor: torch.Tensor) -> None:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._rest is not None:
            data = torch.cat([self._rest, data])
        whole = data.numel() // _WORD * _WORD
        self._rest = data[whole:].clone() if whole < data.numel() else None
        if whole:
            # a view in words needs an aligned address, which a slice of bytes may lack
            part = data[:whole] if data.data_ptr() % _WORD == 0 else data[:whole].clone()
            self._add_words(part.view(torch.int32))

    def _add_words(self, words: torch.Tensor) -> None:
        begin, count = self._num_words, words.numel()
        self._num_words = end = begin + count
        # longer with every part: the size of the whole tensor is not known
        num_tiles = -(-end // _TILE)
        sums = torch.zeros(num_tiles, 2, dtype=torch.int32, device=words.device)
        if self._sums is not None:
            sums[: len(self._sums)] = self._sums
        self._sums = sums
        blocks = -(-end // _BLOCK) - begin // _BLOCK
        add_words[(blocks,)](words, sums, begin, count, seed1=_SEED, seed2=_SECOND_SEED, TILE=_TILE, BLOCK=_BLOCK)

    def digest(self) -> str:
        if self._rest is not None:  # the end of a tensor is filled up with zeros
            filled = torch.nn.functional.pad(self._rest, (0, _WORD - self._rest.numel()))
            self._rest = None
            self._add_words(filled.view(torch.int32))
        if self._sums is None:
            return f"{0:016x}"
        # int64: SGLang's unsigned words, and sums that wrap around as its sums do
        tiles = _finished((self._sums.long() & _MASK) ^ (self._num_words * _WORD & _MASK))
        total = int(((tiles[:, 0] << 32) | tiles[:, 1]).sum().item()) & _MASK_64
        return f"{_split_mixed(total):016x}"


def _finished(x: torch.Tensor) -> torch.Tensor:
    """The mixing function of SGLang on words in int64."""
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        x = (x ^ (x >> (16 if shift == 13 else 13))) * factor & _MASK
    return x ^ (x >> 16)


def _split_mixed(x: int) -> int:
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        x = (x ^ (x >> shift)) * factor & _MASK_64
    return x ^ (x >> 31)
