"""What travels from the trainer to the engines: named tensors, grouped into buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slime.backends.protocols import NamedTensor

__all__ = ["WeightChunk", "into_chunks"]


@dataclass(frozen=True)
class WeightChunk:
    """Tensors that are sent together, as one flat byte buffer.

    Attributes:
        tensors: (Hugging Face name, full unsharded tensor) in the order in which they are sent.
    """

    tensors: Sequence[NamedTensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)

    def flatten(self) -> torch.Tensor:
        """All bytes behind one another: uint8 [num_bytes], the layout of SGLang's ``flattened_bucket``."""
        return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in self.tensors])


def into_chunks(weights: Iterable[NamedTensor], max_bytes: int) -> Iterator[WeightChunk]:
    """Group tensors into chunks of at most ``max_bytes``; a tensor larger than that travels alone.

    A chunk holds one dtype, so that every tensor of the flat buffer starts at an offset aligned to its dtype. Tensors
    that an engine fuses are never in different chunks.
    """
    pending: list[NamedTensor] = []
    size = 0
    for unit in _units(weights):
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in unit)
        if pending and (size + num_bytes > max_bytes or pending[0][1].dtype != unit[0][1].dtype):
            yield WeightChunk(pending)
            pending, size = [], 0
        pending.extend(unit)
        size += num_bytes
    if pending:
        yield WeightChunk(pending)


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
