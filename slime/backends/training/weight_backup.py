"""A second set of weights in host memory that takes turns with the live ones: the reference. Used by ``trainer``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from slime.utils import accelerator

__all__ = ["WeightBackup"]


class WeightBackup:
    """A copy of what ``weights``, the live tensors of this rank, held when this was made."""

    @torch.no_grad()
    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._parameters = list(weights)
        pin = not accelerator.current().is_cpu
        self._copy = [self._host(parameter, pin).copy_(parameter) for parameter in self._parameters]
        self._live = [self._host(parameter, pin) for parameter in self._parameters]

    @staticmethod
    def _host(parameter: torch.Tensor, pin: bool) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=pin)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the copied weights inside the block; its own are back afterwards, bit for bit."""
        with torch.no_grad():
            for parameter, copy, live in zip(self._parameters, self._copy, self._live, strict=True):
                live.copy_(parameter)
                parameter.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, live in zip(self._parameters, self._live, strict=True):
                    parameter.copy_(live)
