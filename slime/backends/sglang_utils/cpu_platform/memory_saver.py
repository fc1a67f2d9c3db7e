"""Release of memory for engines on a CPU, the counterpart of ``torch_memory_saver`` on a GPU.

Tensors keep their addresses. The operating system takes back the pages of tensors that were created inside a region
when the region is paused. Afterwards they read as zeros: as on a GPU, the content is lost. An engine that released its
weights needs a weight sync before it can serve.

SGLang 0.5.23 creates the adapter with ``TorchMemorySaverAdapter.create``. The hook that replaces it is in ``hooks``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
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
    """Adapter that releases pages with ``madvise``."""

    # Of the class: SGLang creates several adapters, and regions belong to the process, as in torch_memory_saver.
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
        """Context whose tensors belong to ``tag``."""
        if enable_cpu_backup:  # a backup would take the same memory again: nothing to release
            yield
            return
        found = self._blocks[tag]
        with _Storages(found):
            yield
        # temporary tensors of the block: their memory may belong to other tensors by now
        for key in [key for key, block in found.items() if block.storage.expired()]:
            del found[key]

    def pause(self, tag: str) -> None:
        """Release the pages of ``tag``."""
        for block in self._blocks[tag].values():
            if not block.storage.expired():
                _drop_pages(block.address, block.num_bytes)

    def resume(self, tag: str) -> None:
        """Do nothing: the kernel maps zero pages at the next access."""


class _Storages(TorchDispatchMode):
    """Collects the storage of every tensor that an operator returns."""

    def __init__(self, found: dict[int, _Block]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, given: Any = (), kwargs: Any = None) -> Any:
        result = func(*given, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                block = _Block(storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage))
                self._found[block.storage.cdata] = block
        return result


_libc = ctypes.CDLL(None, use_errno=True)


def _drop_pages(address: int, num_bytes: int) -> None:
    # Whole pages only: the first and the last page of a block may contain other objects.
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")
