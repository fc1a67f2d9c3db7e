"""A second set of weights in host memory that takes turns with the live ones: the reference. Used by ``actor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slime.utils import accelerator

__all__ = ["WeightBackup"]


def _weights(chunk: Any) -> Iterator[torch.Tensor]:
    """Everything a checkpoint holds: parameters, and the bias with which routers choose experts."""
    yield from chunk.parameters()
    yield from (buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias"))


class WeightBackup:
    """A copy of the weights that the model ``chunks`` of this rank had when this was made."""

    @torch.no_grad()
    def __init__(self, chunks: Sequence[Any]) -> None:
        self._parameters = [tensor for chunk in chunks for tensor in _weights(chunk)]
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
