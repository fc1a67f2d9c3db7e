"""SGLang's checksum of a tensor on a GPU, of parts that arrive one after the other.

``gpu_tensor_hash`` of SGLang 0.5.23 (kernels/ops/memory/gpu_tensor_hash.py) reads a whole tensor: the hash of each
32-bit word depends on its place, and words are added up in tiles of 8192. The sums of a tile can therefore be computed
part by part, in any order, and no rank needs the fused tensor. Each byte is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


@triton.jit(do_not_specialize=["begin", "count", "room"])  # type: ignore[untyped-decorator]
def add_words(  # type: ignore[no-untyped-def]
    words, sums, begin, count, room, seed1: tl.constexpr, seed2: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the hashes of words to the sums of their tiles.

    Args:
        words: [shares, count]. Those of a share begin at word ``begin`` of its tensor.
        sums: [shares, room tiles, 2].
    """
    share = tl.program_id(axis=1).to(tl.int64)
    words += share * count
    sums += share * room * 2
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
    """The checksums of all shares of one tensor (protocol TensorHash)."""

    needs_order = False

    def __init__(self, num_shares: int = 1) -> None:
        self.num_shares = num_shares
        self._num_words = 0  # of a share
        self._sums: torch.Tensor | None = None  # [shares, tiles and more, 2]
        self._rest: torch.Tensor | None = None  # [shares, bytes of a word]

    def add(self, tensor: torch.Tensor, order: int | None = None) -> None:
        data = tensor.detach().contiguous().reshape(self.num_shares, -1).view(torch.uint8)
        size = data.shape[1]
        if order is not None:
            if size % _WORD:
                raise ValueError(f"parts of {size} bytes, which is no multiple of {_WORD}, need their order")
            self._add_words(_words(data), order * size // _WORD)
            return
        if self._rest is not None:
            data = torch.cat([self._rest, data], 1)
        whole = data.shape[1] // _WORD * _WORD
        self._rest = data[:, whole:].clone() if whole < data.shape[1] else None
        if whole:
            self._add_words(_words(data[:, :whole]), self._num_words)

    def _add_words(self, words: torch.Tensor, begin: int) -> None:
        count = words.shape[1]
        self._num_words = max(self._num_words, begin + count)
        num_tiles, room = -(-self._num_words // _TILE), 0 if self._sums is None else self._sums.shape[1]
        if self._sums is None or room < num_tiles:
            # The size of the whole tensor is not known. Twice as long each time, so that few parts copy the sums.
            longer = words.new_zeros(self.num_shares, max(num_tiles, 2 * room), 2)
            if self._sums is not None:
                longer[:, :room] = self._sums
            self._sums, room = longer, longer.shape[1]
        grid = -(-(begin + count) // _BLOCK) - begin // _BLOCK, self.num_shares
        seeds = {"seed1": _SEED, "seed2": _SECOND_SEED}
        add_words[grid](words, self._sums, begin, count, room, **seeds, TILE=_TILE, BLOCK=_BLOCK)

    def totals(self) -> torch.Tensor | None:
        """The sum of SGLang's hashes of the tiles: int64 [shares]. None without a word."""
        if self._rest is not None:  # the end of a tensor is filled up with zeros
            filled = torch.nn.functional.pad(self._rest, (0, _WORD - self._rest.shape[1]))
            self._rest = None
            self._add_words(filled.view(torch.int32), self._num_words)
        if self._sums is None:
            return None
        sums = self._sums[:, : -(-self._num_words // _TILE)]
        # int64: SGLang's unsigned words, and sums that wrap around as its sums do
        parts = _finished((sums.long() & _MASK) ^ (self._num_words * _WORD & _MASK))
        return ((parts[..., 0] << 32) | parts[..., 1]).sum(1)


def tile_digests(hashes: Sequence[TileHash]) -> list[list[str]]:
    """The checksums. The host waits for the device once per 256 tensors."""
    return [texts for begin in range(0, len(hashes), 256) for texts in _digests(hashes[begin : begin + 256])]


def _digests(hashes: Sequence[TileHash]) -> Iterator[list[str]]:
    totals = [each.totals() for each in hashes]
    on_device = [each for each in totals if each is not None]
    values = iter(torch.cat(on_device).tolist() if on_device else [])
    for each, of_hash in zip(hashes, totals, strict=True):
        own = [0 if of_hash is None else _split_mixed(next(values) & _MASK_64) for _ in range(each.num_shares)]
        yield [f"{value:016x}" for value in own]


def _words(data: torch.Tensor) -> torch.Tensor:
    # a view in words needs an aligned address, which a slice of bytes may lack
    flat = data.reshape(-1)
    return (flat if flat.data_ptr() % _WORD == 0 else flat.clone()).view(torch.int32).view(len(data), -1)


def _finished(x: torch.Tensor) -> torch.Tensor:
    """The mixing function of SGLang on words in int64."""
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        x = (x ^ (x >> (16 if shift == 13 else 13))) * factor & _MASK
    return x ^ (x >> 16)


def _split_mixed(x: int) -> int:
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        x = (x ^ (x >> shift)) * factor & _MASK_64
    return x ^ (x >> 31)
