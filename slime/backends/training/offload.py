"""The trainer's memory on the device: given up while engines generate there, taken back for the next step.

    part        what it is                                    while it is offloaded
    weights     parameters and buffers of the model           in host memory
    gradients   gradient buffers                              nowhere: every step starts from zeros
    optimizer   fp32 main weights and moments                 in host memory

Only storages are emptied and filled again. Tensors, the views that a backend cuts out of its buffers, and everything
that refers to them stay unchanged, so nothing has to be rebuilt and the next step is bit for bit the same.

One storage at a time is copied and freed; on the device the peak does not rise. Host memory is pinned once and kept,
because pinning costs more than copying. On a CPU the same code runs: there only the gradients' memory is gained.

Called by ``trainer``; each backend names its tensors. Process groups and the copies of other weights
(:class:`WeightBackup`) are not touched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from slime.backends.protocols import TRAINER_PARTS, TrainerPart
from slime.utils import accelerator
from slime.utils.errors import SlimeError


class DeviceMemory:
    """The memory of a trainer on its device.

    Args:
        tensors: those of a part, on whatever device they are.
        drop_gradients: forgets gradients that lie outside of the part's tensors.
    """

    def __init__(
        self, tensors: Callable[[TrainerPart], Iterable[torch.Tensor]], drop_gradients: Callable[[], None]
    ) -> None:
        self._tensors = tensors
        self._drop_gradients = drop_gradients
        self._offloaded: dict[TrainerPart, list[tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[TrainerPart, list[torch.Tensor]] = {}
        self._has_frozen = False

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Give the device memory of ``parts`` back to the driver. Offloaded parts stay so."""
        parts = [part for part in parts if part not in self._offloaded]
        if not parts:
            return
        for part in parts:
            storages = self._storages(part)
            self._offloaded[part] = [(storage, storage.nbytes()) for storage in storages]
            if part == "gradients":
                self._drop_gradients()
                accelerator.current().synchronize()
                for storage in storages:
                    storage.resize_(0)
            else:
                self._host[part] = list(_moved_out(storages, self._host.pop(part, [])))
        self._collect_garbage()
        accelerator.current().empty_cache()

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Take the memory back and fill it as it was; gradients are zeros. Parts on the device stay so."""
        for part in parts:
            if part not in self._offloaded:
                continue
            storages = self._offloaded.pop(part)
            if part == "gradients":
                for storage, size in storages:
                    storage.resize_(size)
                    storage.fill_(0)  # type: ignore[attr-defined] # torch's stubs lack it
                continue
            for (storage, size), host in zip(storages, self._host[part], strict=True):
                storage.resize_(size)
                storage.copy_(host.untyped_storage(), non_blocking=True)
            accelerator.current().synchronize()
            if accelerator.current().is_cpu:
                del self._host[part]

    def require(self, parts: Iterable[TrainerPart], who: str) -> None:
        """Refuse to start ``who``, which needs ``parts`` on the device: kernels would read freed memory.

        Raises:
            SlimeError: one of them is offloaded.
        """
        missing = [part for part in parts if part in self._offloaded]
        if missing:
            raise SlimeError(f"{who} needs the trainer's {' and '.join(missing)} on the device: call onload() first.")

    def _collect_garbage(self) -> None:
        """Cycles of dead objects may hold tensors. Survivors are not visited again: the half a million
        objects of the libraries alone would cost a quarter of a second each time.
        """
        gc.collect()
        if not self._has_frozen:
            gc.freeze()
            self._has_frozen = True

    def _storages(self, part: TrainerPart) -> list[torch.UntypedStorage]:
        """Each once. A storage belongs to the first part that holds it: main weights may be views of parameters."""
        device = accelerator.current().device().type
        found: dict[int, torch.UntypedStorage] = {}
        earlier: set[int] = set()
        for name in TRAINER_PARTS:
            for tensor in self._tensors(name):
                storage = tensor.untyped_storage()
                if storage.nbytes() == 0 or storage.device.type != device:
                    continue  # offloaded with an earlier part, or in host memory anyway
                if name == part and storage.data_ptr() not in earlier:
                    found[storage.data_ptr()] = storage
                earlier.add(storage.data_ptr())
            if name == part:
                break
        return list(found.values())


def _moved_out(storages: Sequence[torch.UntypedStorage], kept: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of each storage in host memory, the storage empty; ``kept`` is used again if it fits."""
    pin = not accelerator.current().is_cpu
    for index, storage in enumerate(storages):
        fits = index < len(kept) and kept[index].numel() == storage.nbytes()
        host = kept[index] if fits else torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        host.untyped_storage().copy_(storage, non_blocking=True)
        accelerator.current().synchronize()
        storage.resize_(0)
        yield host


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
        """Copy the live tensors."""
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
