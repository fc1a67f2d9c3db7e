"""A second set of weights in host memory that takes turns with the live ones: the reference. Used by ``trainer``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from slime.utils import accelerator

__all__ = ["WeightBackup"]


class WeightBackup:
    """A copy of what ``weights``, the live tensors of this rank, held when this was made, or last refreshed.

    Where the live ones wait while the copy is swapped in is memory of that time only. It is pinned, and PyTorch keeps
    pinned memory for the next who asks: all copies of a process share it.
    """

    @torch.no_grad()
    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._parameters = list(weights)
        self._copy = [_on_host(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def refresh(self) -> None:
        """Hold what the live tensors are now."""
        for parameter, copy in zip(self._parameters, self._copy, strict=True):
            copy.copy_(parameter)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the copied weights inside the block; its own are back afterwards, bit for bit."""
        with torch.no_grad():
            live = [_on_host(parameter) for parameter in self._parameters]
            for parameter, copy in zip(self._parameters, self._copy, strict=True):
                parameter.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip(self._parameters, live, strict=True):
                    parameter.copy_(own)


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    is_pinned = not accelerator.current().is_cpu
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=is_pinned).copy_(parameter)
