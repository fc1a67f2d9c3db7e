"""A chunk of weights as ``/update_weights_from_tensor`` of stock SGLang takes it: a handle to memory, not the bytes.

On a CPU the bytes lie in shared memory of this host, on a GPU in this process's device memory (CUDA IPC). Either way
the engine must be on the same host, and on a GPU on the same device. The other side unpickles with a list of allowed
names, so that everything here is plain: a dictionary, torch's own handles, and namespaces for SGLang's metadata.
SGLang is not imported, because that takes seconds and a gigabyte.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from slime.utils.errors import EngineError
from slime.weight_sync.chunks import WeightChunk

__all__ = ["serialized", "shareable"]

_SHARED_MEMORY = "/dev/shm"
_DEVICE_ARGUMENT = 6
"""Where ``rebuild_cuda_tensor`` takes the device."""


def shareable(chunk: WeightChunk) -> torch.Tensor:
    """All bytes of ``chunk``, uint8 [num_bytes], in memory that another process of this host can open.

    Fresh memory each time: an engine may still be reading what it was sent before.

    Raises:
        EngineError: the host has too little shared memory.
    """
    if chunk.tensors[0][1].is_cuda:
        return chunk.flatten()
    free = _free_shared_memory()
    if free is not None and free < chunk.num_bytes:
        raise EngineError(
            f"{_SHARED_MEMORY} has {free} bytes left, a bucket of weights needs {chunk.num_bytes}: lower "
            "--update-weight-buffer-size, or give the container more shared memory (docker run --shm-size)."
        )
    storage = torch.UntypedStorage._new_using_filename_cpu(chunk.num_bytes)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return chunk.flatten(out=flat)


def serialized(flat: torch.Tensor, chunk: WeightChunk) -> str:
    """The request's text for one tensor-parallel rank: base64 of a pickle of some kilobytes.

    Args:
        flat: the bytes of ``chunk``, from :func:`shareable`; must live until the engine has answered.
    """
    metadata, begin = [], 0
    for name, tensor in chunk.tensors:
        end = begin + tensor.nbytes
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=begin,
                end_idx=end,
                numel=tensor.nbytes,
            )
        )
        begin = end
    buffer = io.BytesIO()
    with _sharing_by_name():
        pickler = ForkingPickler(buffer)
        pickler.dispatch_table[torch.Tensor] = _reduce_tensor
        pickler.dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Torch's own, but a GPU is named by its UUID: the engine may count devices differently."""
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if rebuild is reductions.rebuild_cuda_tensor:
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        arguments = (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
    return rebuild, arguments


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Torch would pass file descriptors, which only children of this process can receive."""
    strategy: Any = torch.multiprocessing
    before = strategy.get_sharing_strategy()
    strategy.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        strategy.set_sharing_strategy(before)


def _free_shared_memory() -> int | None:
    """Bytes, None where it is not known."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
