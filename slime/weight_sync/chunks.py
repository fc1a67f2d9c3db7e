"""Weights on their way to the engines: named tensors in buckets of bounded size, without unchanged tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import TypeAlias

import torch

from slime.backends import NamedTensor
from slime.utils.memory_utils import bytes_of
from slime.weight_sync.tensor_files import Checksum, checksum_function

LEAST_BUCKET = 512 * 1024**2
_MOST_BUCKET = 2 * 1024**3
# On a device a bucket exists as shards, gathered, joined, as a row of bytes, and as that of the bucket before.
_SHARE = 8


def bucket_bytes(free: int | None) -> int:
    """Bytes of a bucket if ``free`` bytes of device memory are left. None: in host memory."""
    return LEAST_BUCKET if free is None else min(max(free // _SHARE, LEAST_BUCKET), _MOST_BUCKET)


@dataclass(frozen=True)
class WeightChunk:
    """Tensors that are sent together, as one flat byte buffer.

    Attributes:
        tensors: (Hugging Face name, full unsharded tensor) in the order in which they are sent: those with the widest
            elements first, so that each starts at a multiple of its element size in the flat buffer.
    """

    tensors: Sequence[NamedTensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    def divided(self, belongs_first: Callable[[NamedTensor], bool]) -> tuple[WeightChunk, WeightChunk]:
        """Divide the chunk into (tensors that fulfill ``belongs_first``, all others)."""
        first: list[NamedTensor] = []
        second: list[NamedTensor] = []
        for unit in _units(self.tensors):
            # tensors that an engine fuses stay together, also if only one of them belongs to the first part
            (first if all(map(belongs_first, unit)) else second).extend(unit)
        return WeightChunk(first), WeightChunk(second)

    def metadata(self) -> list[SimpleNamespace]:
        """Name, shape, dtype and place of each tensor in the flat buffer, as SGLang reads them."""
        ends = list(accumulate(tensor.nbytes for _, tensor in self.tensors))
        return [
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=end - tensor.nbytes,
                end_idx=end,
                numel=tensor.nbytes,
            )
            for (name, tensor), end in zip(self.tensors, ends, strict=True)
        ]

    def flatten(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """All bytes in one buffer: uint8 [num_bytes], the layout of SGLang's ``flattened_bucket``.

        Args:
            out: uint8 [num_bytes] to write to. Default: fresh memory on the tensors' device.
        """
        if out is None:
            out = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.tensors[0][1].device)
        begin = 0
        for _, tensor in self.tensors:
            part = out[begin : begin + tensor.nbytes]
            # a view in another dtype needs an aligned offset: the order of the tensors guarantees it
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            begin += tensor.nbytes
        return out


Wants: TypeAlias = Callable[[Sequence[NamedTensor]], bool]
"""Whether to send these tensors, which must be in the same update."""


def into_chunks(weights: Iterable[NamedTensor], max_bytes: int, wants: Wants | None = None) -> Iterator[WeightChunk]:
    """Group tensors into chunks of at most ``max_bytes``. A tensor larger than that travels alone.

    Args:
        wants: whether to keep some tensors that an engine fuses, or one other tensor. Default: all.
    """
    pending: list[NamedTensor] = []
    size = 0
    for unit in _units(weights):
        if wants is not None and not wants(unit):
            continue
        num_bytes = sum(tensor.nbytes for _, tensor in unit)
        # a unit is never divided, because an engine fuses it: one above the limit is a chunk by itself
        if pending and size + num_bytes > max_bytes:
            yield chunk_of(pending)
            pending, size = [], 0
        pending.extend(unit)
        size += num_bytes
    if pending:
        yield chunk_of(pending)


def chunk_of(tensors: Iterable[NamedTensor]) -> WeightChunk:
    """All ``tensors`` in the order of a flat buffer."""
    # the sort is stable, so every rank sends the same order
    return WeightChunk(sorted(tensors, key=lambda named: -named[1].element_size()))


def _units(weights: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Groups of tensors that must be in the same update. Exporters yield them one after the other."""
    unit: list[NamedTensor] = []
    for name, tensor in weights:
        if unit and not _belong_together(unit[-1][0], name):
            yield unit
            unit = []
        unit.append((name, tensor))
    if unit:
        yield unit


def _belong_together(first: str, second: str) -> bool:
    """Whether an engine fuses the two: the down-projections of latent attention, once it has received both."""
    prefix, found, _ = first.partition(".q_a_proj.")
    return bool(found) and second.startswith(prefix + ".kv_a_proj_with_mqa.")


class SentBefore:
    """Checksums of the tensors that the engines hold, for ``--update-weight-changed-only``.

    An update leaves out tensors that are frozen or that the last step did not change. Every trainer rank computes the
    same checksums from the same tensors, so all ranks leave out the same ones.
    """

    def __init__(self) -> None:
        self._held: dict[str, str] = {}
        self._checksum: Checksum = checksum_function("xxh3-128")
        self._is_first = True

    def forget(self) -> None:
        """Drop all checksums: the engines have changed, or an update failed."""
        self._held.clear()

    def begin(self) -> Wants:
        """The filter of one update."""
        self._is_first = True
        return self._wants

    def _wants(self, unit: Sequence[NamedTensor]) -> bool:
        new = {name: self._checksum(bytes_of(tensor)) for name, tensor in unit}
        # the first unit is always sent: its request carries the version
        is_wanted = self._is_first or any(self._held.get(name) != checksum for name, checksum in new.items())
        self._is_first = False
        # recorded before it is sent: after a failed update forget() is called
        self._held |= new
        return is_wanted
