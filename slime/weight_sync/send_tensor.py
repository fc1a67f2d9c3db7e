"""Sends weights to engines on the trainer's devices: engines open the trainer's memory, and no byte leaves the host.

An engine with n tensor-parallel ranks shares the devices of n trainer ranks. Each of them copies a chunk to fresh
memory (shared memory on a CPU, device memory on a GPU). The first of them, the *speaker*, gets the n handles and
makes the engine's one HTTP call. Engine rank k opens handle k, which belongs to its own device.

    trainer rank s      lay out | get handles --> update_weights_from_tensor([p0, ..., pn-1]) --> engine
    trainer rank s+k    lay out | give handle -^

SGLang reads one payload per rank, each with a handle and the names and shapes of all tensors. The ranks of
an engine hold equal tensors, so only handles travel to the speaker, which writes names and shapes once and copies them.
Engines that divide experts by blocks get another list on each rank: there each trainer rank writes its own payload.

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
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from slime.backends import EngineFleet, PendingCalls
from slime.utils import accelerator
from slime.utils.errors import EngineError, kept
from slime.weight_sync.chunks import WeightChunk
from slime.weight_sync.session import TrainerRanks, error_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TensorSender:
    """Sends to the engine on this rank's device, if there is one.

    Args:
        fleet: colocated engines only. ``first_slot`` is the trainer rank of an engine's first device.
        ranks: of the trainer. All of them must create the sender together, because it creates process groups.
        by_block: the ranks of an engine send different experts. Names and sizes may differ then, but not the number of
            chunks.
    """

    def __init__(self, fleet: EngineFleet, ranks: TrainerRanks, *, timeout_s: float, by_block: bool = False) -> None:
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._by_block = by_block
        self._engine: EngineFleet | None = None
        self._is_speaker = False
        self._group: ProcessGroup | None = None
        self._flat: torch.Tensor | None = None
        self._loading: PendingCalls | None = None
        self._failure: Exception | None = None
        self._has_ended = False
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
        flat: torch.Tensor | None = None
        reply: Opening | str | None = None
        if self._failure is None and not self._has_ended:
            errors: list[Exception] = []
            with kept(errors):  # the other ranks of the engine wait in to_first()
                flat = shareable(chunk)
                handle = handle_of(flat)
                reply = payloads(chunk, [handle])[0] if self._by_block else handle
            if errors:
                self._failure = EngineError(f"trainer rank {self._ranks.rank}: {errors[0]}")
        self._arrive()
        # The speaker calls this when the engine is done with the chunk before, whose memory may be freed now, not
        # earlier. After a failure of the engine the other ranks stop to copy.
        self._has_ended = self._ranks.from_first(self._failure is not None, self._group)
        self._flat = flat
        replies = self._ranks.to_first((reply, None if self._failure is None else str(self._failure)), self._group)
        if not self._is_speaker:
            return
        problems = [found for _, found in replies if found is not None]
        if problems and self._failure is None:
            self._failure = EngineError("; ".join(problems))
        if self._failure is None:
            parts = [part for part, _ in replies]
            self._loading = self._engine.start(
                "update_weights_from_tensor",
                serialized_named_tensors=parts if self._by_block else payloads(chunk, parts),
                weight_version=weight_version,
            )

    def finish(self) -> None:
        """Return when the engine has applied everything. Raises the first error of any send."""
        self._arrive()
        if self._engine is not None:
            # only the speaker knows that the engine has answered: no rank may free its memory before
            self._ranks.from_first(None, self._group)
        failure = self._failure
        self._flat = self._failure = None
        self._has_ended = False
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
    if os.path.isdir(_SHARED_MEMORY) and (free := shutil.disk_usage(_SHARED_MEMORY).free) < chunk.num_bytes:
        raise EngineError(
            f"{_SHARED_MEMORY} has {free} bytes left, a bucket of weights needs {chunk.num_bytes}: lower "
            "--update-weight-buffer-size, or give the container more shared memory (docker run --shm-size)."
        )
    # by file name: the engine is not a child of this process and cannot receive a descriptor
    storage = torch.UntypedStorage._new_using_filename_cpu(chunk.num_bytes)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return chunk.flatten(out=flat)


@dataclass(frozen=True)
class Opening:
    """The call by which another process of this host opens shared memory. Arguments may be further calls.

    A tensor in its place would be opened, or copied, by every process on the way to the engine.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def handle_of(flat: torch.Tensor) -> Opening:
    """The handle to ``flat``, from :func:`shareable`. Valid until ``flat`` is freed."""
    with _sharing_by_name():
        return _opening(flat)  # type: ignore[no-any-return]


def _opening(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        reduce: Any = _reduce_tensor
    else:
        reduce = ForkingPickler(io.BytesIO()).dispatch_table.get(type(value))
    if reduce is None:
        return value
    function, arguments = reduce(value)
    return Opening(function, tuple(map(_opening, arguments)))


def payloads(chunk: WeightChunk, handles: Sequence[Any]) -> list[str]:
    """The request's texts, one per handle: base64 of a pickle of ``{"metadata": [...], "flattened_tensor": tensor}``.

    The metadata is pickled once.
    """
    buffer = io.BytesIO()
    first = ForkingPickler(buffer, _PROTOCOL)
    first.dump(chunk.metadata())
    head = pickle.PROTO + bytes([_PROTOCOL]) + pickle.EMPTY_DICT + pickle.MARK
    head += _key("metadata") + _body(buffer) + _key("flattened_tensor")
    texts = []
    for handle in handles:
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer, _PROTOCOL)
        pickler.dispatch_table[Opening] = lambda opening: (opening.function, opening.arguments)
        # the numbers of remembered objects continue those of the metadata
        pickler.memo = first.memo.copy()
        pickler.dump(handle)
        data = head + _body(buffer) + pickle.SETITEMS + pickle.STOP
        texts.append(base64.b64encode(data).decode("ascii"))
    return texts


# The last protocol without frames, whose lengths would be those of the parts.
_PROTOCOL = 3


def _key(text: str) -> bytes:
    return pickle.BINUNICODE + len(text).to_bytes(4, "little") + text.encode()


def _body(buffer: io.BytesIO) -> bytes:
    """A pickle without its protocol at the beginning and its stop at the end."""
    return buffer.getvalue()[2:-1]


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
