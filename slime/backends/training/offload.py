"""Gives the trainer's device memory up while engines generate there, and takes it back for the next step.

    part        content                                       while it is offloaded
    weights     parameters and buffers of the model           in host memory
    gradients   gradient buffers                              nowhere: every step starts from zeros
    optimizer   fp32 main weights and moments                 in host memory

Only storages are emptied and filled again. Tensors, the views that a backend cuts out of its buffers, and all
references to them stay unchanged, so the next step is bit for bit the same. On a CPU the same code runs, but only the
gradients' memory is gained.

Called by ``trainer``. Each backend names its tensors. The copies of other weights (:class:`WeightBackup`) are not
touched, and the memory of NCCL's communicators is given up on request only.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from slime.backends import TRAINER_PARTS, TrainerPart
from slime.utils import accelerator
from slime.utils.errors import ConfigError, SlimeError

_SUSPENDING_NCCL = (2, 29, 7)


class HostPool:
    """Pinned host memory that is used again, by size, because pinning costs more than copying.

    torch keeps small blocks only (``cluster.allocator_env``). On a CPU it is plain memory and not kept.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._filling: threading.Thread | None = None

    def fill(self, sizes: Iterable[int]) -> None:
        """Allocate blocks of ``sizes`` bytes in a thread. :meth:`take` waits for it."""
        self._filling = threading.Thread(target=self._allocate, args=(list(sizes),), name="pin", daemon=True)
        self._filling.start()

    def take(self, num_bytes: int) -> torch.Tensor:
        """A block of uint8 ``[num_bytes]``, with any content."""
        if self._filling is not None:
            self._filling.join()
            self._filling = None
        free = self._free[num_bytes]
        return free.pop() if free else _block(num_bytes)

    def give(self, blocks: Iterable[torch.Tensor]) -> None:
        """Keep ``blocks``, which are not in use any more, for other copies."""
        if not accelerator.current().is_cpu:
            for block in blocks:
                self._free[block.numel()].append(block)

    def _allocate(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._free[size].append(_block(size))


def _block(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=not accelerator.current().is_cpu)


_pool = HostPool()


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
        self._communicators: list[Any] = []
        self._are_suspended = False
        self._has_frozen = False

    def pin_ahead(self, num_moments: int) -> None:
        """Pin the host memory of the first offloads in a thread, so that it does not delay the first rollout.

        Args:
            num_moments: tensors that the first step adds to each of the optimizer's.
        """
        sizes = [storage.nbytes() for storage in self._storages("weights")]
        of_optimizer = [storage.nbytes() for storage in self._storages("optimizer")]
        _pool.fill(sizes + (1 + num_moments) * of_optimizer)

    def take_communicators(self) -> None:
        """Give up the memory of this process's NCCL communicators, too, from now on while all parts are offloaded.

        Those of later groups, as of a weight sync to other devices, keep it.

        Raises:
            ConfigError: NCCL is too old.
        """
        self._communicators = list(_communicators())
        if self._communicators and (found := torch.cuda.nccl.version()) < _SUSPENDING_NCCL:
            wanted, is_here = (".".join(map(str, version)) for version in (_SUSPENDING_NCCL, found))
            raise ConfigError(f"--offload-communicators needs NCCL {wanted} or later, and this is {is_here}: drop it.")

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
                # nothing is copied: every step starts from zero gradients
                for storage in storages:
                    storage.resize_(0)
            else:
                self._host[part] = list(_moved_out(storages))
        if len(self._offloaded) == len(TRAINER_PARTS):
            self._suspend(True)
        self._collect_garbage()
        # back to the driver: the engines are other processes
        accelerator.current().empty_cache()

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Take the memory back and fill it as it was. Gradients are zeros. Parts on the device stay so."""
        self._suspend(False)
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
            _pool.give(self._host.pop(part))

    def require(self, parts: Iterable[TrainerPart], who: str) -> None:
        """Refuse to start ``who``, which needs ``parts`` on the device: kernels would read freed memory.

        Raises:
            SlimeError: one of them is offloaded.
        """
        missing = [part for part in parts if part in self._offloaded]
        if missing:
            raise SlimeError(f"{who} needs the trainer's {' and '.join(missing)} on the device: call onload() first.")

    def _suspend(self, is_wanted: bool) -> None:
        if is_wanted == self._are_suspended:
            return
        accelerator.current().synchronize()  # nothing may use them meanwhile
        for communicator in self._communicators:
            communicator.suspend() if is_wanted else communicator.resume()
        self._are_suspended = is_wanted

    def _collect_garbage(self) -> None:
        gc.collect()  # cycles of dead objects may hold tensors
        # frozen objects are not visited again: the half a million of the libraries would cost 0.25 s each time
        if not self._has_frozen:
            gc.freeze()
            self._has_frozen = True

    def _storages(self, part: TrainerPart) -> list[torch.UntypedStorage]:
        """The storages of ``part`` on the device, each once."""
        device = accelerator.current().device().type
        found: dict[int, torch.UntypedStorage] = {}
        earlier: set[int] = set()
        for name in TRAINER_PARTS:
            for tensor in self._tensors(name):
                storage = tensor.untyped_storage()
                if storage.nbytes() == 0 or storage.device.type != device:
                    continue  # offloaded with an earlier part, or in host memory anyway
                # a storage belongs to the first part that holds it: main weights may be views of parameters
                if name == part and storage.data_ptr() not in earlier:
                    found[storage.data_ptr()] = storage
                earlier.add(storage.data_ptr())
            if name == part:
                break
        return list(found.values())


def _communicators() -> Iterator[Any]:
    """The NCCL part of each process group, in the order of their creation, which all ranks share."""
    for group in c10d._world.pg_map:
        backends = [group._get_backend(device) for device in group._device_types]
        yield from {id(one): one for one in backends if one.name() == "nccl"}.values()


def _moved_out(storages: Sequence[torch.UntypedStorage]) -> Iterator[torch.Tensor]:
    """The bytes of each storage in host memory, the storage empty."""
    for storage in storages:
        host = _pool.take(storage.nbytes())
        host.untyped_storage().copy_(storage, non_blocking=True)
        accelerator.current().synchronize()  # the copy must be complete before the memory is freed
        storage.resize_(0)  # one storage at a time: the peak on the device does not rise
        yield host


class WeightBackup:
    """A copy in host memory of ``weights``, the live tensors of this rank, as of the last refresh."""

    @torch.no_grad()
    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._parameters = list(weights)
        blocks = [_block(parameter.nbytes) for parameter in self._parameters]
        self._copy = [_copied(parameter, block) for parameter, block in zip(self._parameters, blocks, strict=True)]
        weakref.finalize(self, _pool.give, blocks).atexit = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the live tensors."""
        for parameter, copy in zip(self._parameters, self._copy, strict=True):
            copy.copy_(parameter)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the copied weights inside the block. The live weights are restored afterwards, bit for bit."""
        with torch.no_grad():
            blocks = [_pool.take(parameter.nbytes) for parameter in self._parameters]
            live = [_copied(parameter, block) for parameter, block in zip(self._parameters, blocks, strict=True)]
            for parameter, copy in zip(self._parameters, self._copy, strict=True):
                # in place: the optimizer and the views of a backend refer to these tensors
                parameter.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, own in zip(self._parameters, live, strict=True):
                    parameter.copy_(own)
            _pool.give(blocks)


class BaseReference:
    """The reference of a run with adapters: the base, or the adapters as of the last refresh.

    Args:
        off: the context in which the model is its base.
        copied: copies the adapters.
    """

    def __init__(self, off: Callable[[], AbstractContextManager[None]], copied: Callable[[], WeightBackup]) -> None:
        self._off = off
        self._copied = copied
        self._copy: WeightBackup | None = None

    def refresh(self) -> None:
        """Take the live adapters from now on."""
        self._copy = self._copied()

    def swapped_in(self) -> AbstractContextManager[None]:
        """The model is the reference inside the block."""
        return self._off() if self._copy is None else self._copy.swapped_in()


def _copied(parameter: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    return block.view(parameter.dtype).view(parameter.shape).copy_(parameter)
