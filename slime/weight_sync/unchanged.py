"""Leaves out what the engines have already: tensors that are frozen, or that a step did not move by a bit.

For ``--update-weight-changed-only``. Each trainer rank remembers a checksum of every tensor that was sent; as all ranks
see the same tensors, all leave out the same ones. Forgotten when the engines change or an update fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.backends.protocols import NamedTensor
from slime.weight_sync.chunks import Wants
from slime.weight_sync.tensor_files import Bytes, Checksum, checksum_function

__all__ = ["SentBefore"]


class SentBefore:
    """What the engines hold, by checksum."""

    def __init__(self) -> None:
        self._held: dict[str, str] = {}
        self._checksum: Checksum = checksum_function("xxh3-128")
        self._is_first = True

    def forget(self) -> None:
        """The engines may hold anything."""
        self._held.clear()

    def begin(self) -> Wants:
        """What says which tensors an update needs; its first ones in any case, because they carry the version."""
        self._is_first = True
        return self._wants

    def _wants(self, unit: Sequence[NamedTensor]) -> bool:
        """Whether any tensor of ``unit``, which travels as a whole, is not what was sent last."""
        new = {name: self._checksum(_bytes(tensor)) for name, tensor in unit}
        is_wanted = self._is_first or any(self._held.get(name) != checksum for name, checksum in new.items())
        self._is_first = False
        self._held |= new
        return is_wanted


def _bytes(tensor: torch.Tensor) -> Bytes:
    data: Bytes = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
    return data
