"""Parts of a checkpoint that all backends store in one form: shards, and random number generators.

Shards have the format of torch's distributed checkpoints. torch's own writer keeps the host copies of all tensors of a
file until the file is complete. This one holds a single tensor for each file that it writes.

``.metadata``, ``common.pt`` and the objects in shards are pickles, which can call any function. Here they cannot.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from slime.data.dump_file import load_plain, plain_pickle
from slime.utils import accelerator

_NUM_THREADS = 2  # files that a rank writes at a time


@dataclass(frozen=True)
class Piece:
    """A tensor, or an object in torch's file format, and its place in the checkpoint.

    Attributes:
        make: gives the tensor when it is written. ``data`` is then of the meta device.
    """

    item: WriteItem
    data: torch.Tensor | io.BytesIO
    make: Callable[[], torch.Tensor] | None = None

    @property
    def content(self) -> torch.Tensor | io.BytesIO:
        return self.data if self.make is None else self.make()

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, torch.Tensor) else len(self.data.getbuffer())


def keep_copies(pieces: Sequence[Piece], max_bytes: int) -> tuple[list[Piece], list[Piece]]:
    """Copy pieces to new host memory, so that training may change the live ones.

    Returns:
        Pieces that did not fit into ``max_bytes``, and the copies.
    """
    rest, copies = [], []
    for piece in pieces:
        is_small = piece.num_bytes <= max_bytes
        if isinstance(piece.data, torch.Tensor) and not is_small:
            rest.append(piece)
        elif isinstance(content := piece.content, torch.Tensor):
            max_bytes -= piece.num_bytes
            copies.append(Piece(piece.item, content.to("cpu", copy=True)))
        else:
            copies.append(piece)
    return rest, copies


def write(
    pieces: Sequence[Piece], directory: Path, stage: Literal["live", "copied"], written: Callable[[int], None]
) -> list[WriteResult]:
    """Write ``pieces`` to new files of this rank.

    Args:
        stage: each has its file names.
        written: called with the bytes of each piece.
    """
    first_file = {"live": 0, "copied": _NUM_THREADS}[stage]
    shares: list[list[Piece]] = [[] for _ in range(_NUM_THREADS)]
    sizes = [0] * _NUM_THREADS
    for piece in sorted(pieces, key=lambda piece: -piece.num_bytes):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(piece)
        sizes[smallest] += piece.num_bytes
    names = [f"__{dist.get_rank()}_{first_file + index}.distcp" for index in range(_NUM_THREADS)]
    with ThreadPoolExecutor(_NUM_THREADS, "shards") as pool:
        work = [
            pool.submit(_write_file, directory / name, share, written)
            for name, share in zip(names, shares, strict=True)
            if share
        ]
        return [result for one in work for result in one.result()]


def _write_file(path: Path, pieces: Sequence[Piece], written: Callable[[int], None]) -> list[WriteResult]:
    results = []
    with path.open("wb") as file:
        for piece in pieces:
            data = piece.content
            if isinstance(data, torch.Tensor):
                data = data.cpu()
                # torch would write the whole memory of which this is a view
                if data.untyped_storage().nbytes() != data.nbytes or not data.is_contiguous():
                    data = data.contiguous().clone()
            result = _write_item(
                _StorageWriterTransforms(), file, data, piece.item, path.name, SerializationFormat.TORCH_SAVE
            )
            results.append(result)
            written(piece.num_bytes)
        file.flush()
        os.fsync(file.fileno())
    return results


_RECORDS = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "megatron.core.")
"""Packages that write checkpoints with dataclasses and enums in them."""


class PlainReader(FileSystemReader):
    """Reads the metadata without running code that it may name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As that of the base class."""
        path, plain = self._get_metadata_path(kwargs.get("rank")), plain_pickle(_RECORDS)
        with self.fs.create_stream(path, "rb") as file:
            metadata: Metadata = plain.load(file)
        plain.warn(path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Reads objects in shards without running code that they may name."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the object into the state that is being loaded."""
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], load_object(value))


def load_object(file: Path | BinaryIO) -> Any:
    """An object of a checkpoint, see ``load_plain``."""
    return load_plain(file, records=_RECORDS)


def generator_states() -> dict[str, Any]:
    """The states of this process's random number generators."""
    numpy_kind, numpy_keys, *numpy_rest = np.random.get_state(legacy=True)
    return {
        "random": random.getstate(),
        # a tensor, because torch.load with weights_only refuses numpy arrays
        "numpy": (numpy_kind, torch.from_numpy(np.asarray(numpy_keys).astype(np.int64)), *numpy_rest),
        "torch": torch.get_rng_state(),
        "device": accelerator.current().rng_state(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Continue with ``states``, from :func:`generator_states`."""
    random.setstate(states["random"])
    numpy_kind, numpy_keys, *numpy_rest = states["numpy"]
    np.random.set_state((numpy_kind, numpy_keys.numpy().astype(np.uint32), *numpy_rest))
    torch.set_rng_state(states["torch"])
    accelerator.current().set_rng_state(states.get("device"))
