"""What travels from the trainer to the engines: named tensors, grouped into buckets of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from slime.backends.protocols import NamedTensor

__all__ = ["Wants", "WeightChunk", "into_chunks"]


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
        """Tensors that ``belongs_first`` says yes to, and the others; what an engine fuses stays together."""
        first: list[NamedTensor] = []
        second: list[NamedTensor] = []
        for unit in _units(self.tensors):
            (first if all(map(belongs_first, unit)) else second).extend(unit)
        return WeightChunk(first), WeightChunk(second)

    def flatten(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """All bytes behind one another: uint8 [num_bytes], the layout of SGLang's ``flattened_bucket``.

        Args:
            out: uint8 [num_bytes] to write to; default fresh memory on the tensors' device.
        """
        if out is None:
            out = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.tensors[0][1].device)
        begin = 0
        for _, tensor in self.tensors:
            part = out[begin : begin + tensor.nbytes]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            begin += tensor.nbytes
        return out


Wants: TypeAlias = Callable[[Sequence[NamedTensor]], bool]
"""Whether these tensors, which need one another in the same update, are to be sent."""


def into_chunks(weights: Iterable[NamedTensor], max_bytes: int, wants: Wants | None = None) -> Iterator[WeightChunk]:
    """Group tensors into chunks of at most ``max_bytes``; a tensor larger than that travels alone.

    Tensors that an engine fuses are never in different chunks.

    Args:
        wants: leaves out what it says no to; default nothing.
    """
    pending: list[NamedTensor] = []
    size = 0
    for unit in _units(weights):
        if wants is not None and not wants(unit):
            continue
        num_bytes = sum(tensor.nbytes for _, tensor in unit)
        if pending and size + num_bytes > max_bytes:
            yield _chunk(pending)
            pending, size = [], 0
        pending.extend(unit)
        size += num_bytes
    if pending:
        yield _chunk(pending)


def _chunk(tensors: list[NamedTensor]) -> WeightChunk:
    return WeightChunk(sorted(tensors, key=lambda named: -named[1].element_size()))


def _units(weights: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Tensors that need one another in the same update: exporters put them side by side."""
    unit: list[NamedTensor] = []
    for name, tensor in weights:
        if unit and not _belong_together(unit[-1][0], name):
            yield unit
            unit = []
        unit.append((name, tensor))
    if unit:
        yield unit


def _belong_together(first: str, second: str) -> bool:
    """Latent attention: engines fuse the two down-projections of a layer when they have seen both."""
    prefix, found, _ = first.partition(".q_a_proj.")
    return bool(found) and second.startswith(prefix + ".kv_a_proj_with_mqa.")
