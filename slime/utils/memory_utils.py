"""Memory of the device and the host: usage, the release of cached memory, and the bytes of a tensor."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_GIB = 2**30


def available_memory() -> dict[str, float | str]:
    """Memory in GiB of the current device (total, free, used, allocated, reserved) and of the host.

    Without a device the result has only the values of the host, and ``gpu`` is ``none``.
    """
    host = psutil.virtual_memory()
    found: dict[str, float | str] = {"gpu": "none"}
    if torch.cuda.device_count():
        device = torch.cuda.current_device()
        # of the whole device: includes memory of other processes, such as a colocated engine
        free, total = torch.cuda.mem_get_info(device)
        sizes = {"total": total, "free": free, "used": total - free}
        sizes |= {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
        found = {"gpu": str(device)} | {f"{name}_GB": round(size / _GIB, 2) for name, size in sizes.items()}
    sizes = {"total": host.total, "available": host.available, "used": host.used, "free": host.free}
    return found | {f"host_{name}_GB": round(size / _GIB, 2) for name, size in sizes.items()}


def clear_memory(clear_host_memory: bool = False) -> None:
    """Collect garbage and give cached device memory back to the driver.

    Args:
        clear_host_memory: also release pinned host memory that torch caches.
    """
    gc.collect()  # first: tensors in reference cycles hold blocks that empty_cache could not release
    if torch.cuda.device_count():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if clear_host_memory:
            torch._C._host_emptyCache()  # type: ignore[attr-defined]


def print_memory(msg: str, clear_before_print: bool = False) -> dict[str, float | str]:
    """Log the memory of this rank after ``msg`` and return it."""
    if clear_before_print:
        clear_memory()
    found = available_memory()
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    logger.info("[rank %d] memory %s: %s", rank, msg, found)
    return found


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [num_bytes], in host memory. To be read only."""
    # Not numpy(): it forbids for good to resize the storage, and a trainer that offloads resizes it.
    data = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return np.from_dlpack(data).view(np.uint8)
