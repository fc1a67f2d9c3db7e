"""Memory of an engine on a CPU that can be given back: what ``torch_memory_saver`` does on a GPU.

Every tensor stays where it is. The pages behind those that were made inside a region go back to the operating system
when the region is paused and read as zeros afterwards: as on a GPU, what was in them is gone. So an engine that
released its weights really needs a weight sync before it can serve.

SGLang 0.5.23 asks for an adapter with ``TorchMemorySaverAdapter.create``. The hook that returns it is in ``hooks``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class _Block:
    """Memory of one storage. ``storage`` is a weak reference to it."""

    address: int
    num_bytes: int
    storage: StorageWeakRef


class CpuMemorySaver(TorchMemorySaverAdapter):
    """One of several adapters of a process: regions belong to the process, as they do in ``torch_memory_saver``."""

    _blocks: ClassVar[dict[str, dict[int, _Block]]] = defaultdict(dict)

    @property
    def enabled(self) -> bool:
        return True

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cuda_graph(self, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Tensors made in here belong to ``tag``. With a backup nothing is gained: it would be in the same memory."""
        if enable_cpu_backup:
            yield
            return
        found = self._blocks[tag]
        with _Storages(found):
            yield
        for key in [key for key, block in found.items() if block.storage.expired()]:
            del found[key]

    def pause(self, tag: str) -> None:
        """Give the pages of ``tag`` back."""
        for block in self._blocks[tag].values():
            if not block.storage.expired():
                _drop_pages(block.address, block.num_bytes)

    def resume(self, tag: str) -> None:
        """Pages come back when they are touched."""


def create(original: Callable[..., Any], enable: bool) -> Any:
    """Replaces ``TorchMemorySaverAdapter.create``."""
    return CpuMemorySaver() if enable else original(enable)


class _Storages(TorchDispatchMode):
    """Notes the storage of every tensor that comes out of an operator."""

    def __init__(self, found: dict[int, _Block]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                block = _Block(storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage))
                self._found[block.storage.cdata] = block
        return result


_libc = ctypes.CDLL(None, use_errno=True)


def _drop_pages(address: int, num_bytes: int) -> None:
    """Whole pages only: the ends of a block may share theirs with something else."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")
