"""Sends weights to engines on the trainer's devices: engines open the trainer's memory, and no byte leaves the host.

An engine with n tensor-parallel ranks shares the devices of n trainer ranks. Each of them copies a chunk to fresh
memory (shared memory on a CPU, device memory on a GPU). The first of them, the *speaker*, gathers the n handles and
makes the engine's one HTTP call. Engine rank k opens handle k, which belongs to its own device.

    trainer rank s      lay out | gather handles --> update_weights_from_tensor([h0, ..., hn-1]) --> engine
    trainer rank s+k    lay out | give handle ---^

The next chunk is gathered and copied while the engines load this one. The memory of a chunk is freed after its engine
has answered. Every trainer rank has such a sender. A rank without an engine only takes part in gathering the weights.

The request is ``/update_weights_from_tensor`` of stock SGLang: a pickle of a handle to memory. The engine unpickles it
with a list of allowed names, so it holds only a dictionary, torch's handles, and namespaces for SGLang's metadata.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from slime.backends.protocols import EngineFleet, PendingCalls
from slime.utils import accelerator
from slime.utils.errors import EngineError
from slime.weight_sync.chunks import WeightChunk
from slime.weight_sync.session import TrainerRanks, error_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TensorSender:
    """Sends to the engine on this rank's device, if there is one.

    Args:
        fleet: colocated engines only. ``first_slot`` is the trainer rank of an engine's first device.
        ranks: of the trainer. All of them must create the sender together, because it creates process groups.
    """

    def __init__(self, fleet: EngineFleet, ranks: TrainerRanks, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._engine: EngineFleet | None = None
        self._is_speaker = False
        self._group: ProcessGroup | None = None
        self._flat: torch.Tensor | None = None
        self._loading: PendingCalls | None = None
        self._failure: Exception | None = None
        for index, engine in enumerate(fleet.engines):
            assert engine.first_slot is not None, f"{engine.url} is not on the trainer's devices"
            members = range(engine.first_slot, engine.first_slot + engine.num_gpus)
            group = ranks.group(members)
            if ranks.rank in members:
                self._engine, self._group = fleet.only([index]), group
                self._is_speaker = ranks.rank == members[0]

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        """Start to send ``chunk``. Errors are raised by :meth:`finish`."""
        if self._engine is None:
            return
        flat, payload, problem = None, "", None
        if self._failure is None:
            try:
                flat = shareable(chunk)
                payload = serialized(flat, chunk)
            except Exception as error:  # the other ranks of the engine wait in gather()
                problem = f"trainer rank {self._ranks.rank}: {error}"
        self._arrive()
        replies = self._ranks.gather((payload, problem), self._group)
        # after gather() the engine is done with the chunk before: its memory may be freed now, not earlier
        self._flat = flat
        problems = [found for _, found in replies if found is not None]
        if problems and self._failure is None:
            self._failure = EngineError("; ".join(problems))
        if self._is_speaker and self._failure is None:
            self._loading = self._engine.start(
                "update_weights_from_tensor",
                serialized_named_tensors=[text for text, _ in replies],
                weight_version=weight_version,
            )

    def finish(self) -> None:
        """Return when the engine has applied everything. Raises the first error of any send."""
        self._arrive()
        if self._engine is not None:
            # only the speaker knows that the engine has answered: no rank may free its memory before
            self._ranks.gather(None, self._group)
        failure = self._failure
        self._flat = self._failure = None
        accelerator.current().give_back_shared()
        if failure is not None:
            raise failure

    def _arrive(self) -> None:
        """Wait for the engine's answer to the chunk before. Only the speaker has a call under way."""
        loading, self._loading = self._loading, None
        if loading is not None:
            error = error_of(lambda: loading.wait(self._timeout_s))  # wait even after a failure: the first one is kept
            self._failure = self._failure or error

    def disconnect(self) -> None:
        """Leave the engine."""
        import torch.distributed as dist

        self._flat = self._loading = self._failure = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


_SHARED_MEMORY = "/dev/shm"
# position of the device among the arguments of torch's ``rebuild_cuda_tensor``
_DEVICE_ARGUMENT = 6


def shareable(chunk: WeightChunk) -> torch.Tensor:
    """All bytes of ``chunk``, uint8 [num_bytes], in memory that another process of this host can open.

    Each call takes fresh memory, because an engine may still read the chunk before.

    Raises:
        EngineError: the host has too little shared memory.
    """
    if chunk.tensors[0][1].is_cuda:
        return chunk.flatten()
    # without the check a full /dev/shm ends the process with SIGBUS at the first write
    free = _free_shared_memory()
    if free is not None and free < chunk.num_bytes:
        raise EngineError(
            f"{_SHARED_MEMORY} has {free} bytes left, a bucket of weights needs {chunk.num_bytes}: lower "
            "--update-weight-buffer-size, or give the container more shared memory (docker run --shm-size)."
        )
    # by file name: the engine is not a child of this process and cannot receive a descriptor
    storage = torch.UntypedStorage._new_using_filename_cpu(chunk.num_bytes)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return chunk.flatten(out=flat)


def serialized(flat: torch.Tensor, chunk: WeightChunk) -> str:
    """The request's text for one tensor-parallel rank: base64 of a pickle of some kilobytes.

    Args:
        flat: the bytes of ``chunk``, from :func:`shareable`. Must live until the engine has answered.
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
    """Reduce a tensor as torch does, but name its GPU by UUID."""
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if rebuild is reductions.rebuild_cuda_tensor:
        # an engine with another CUDA_VISIBLE_DEVICES counts the devices differently
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        arguments = (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
    return rebuild, arguments


@contextmanager
def _sharing_by_name() -> Iterator[None]:
    """Share CPU memory by file name inside the block."""
    strategy: Any = torch.multiprocessing
    before = strategy.get_sharing_strategy()
    # the default passes file descriptors, which only children of this process can receive
    strategy.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        strategy.set_sharing_strategy(before)


def _free_shared_memory() -> int | None:
    """Free bytes of shared memory. None if unknown."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
