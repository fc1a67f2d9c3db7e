"""Divides named tensors into safetensors files, which one or several processes write.

All processes see the same tensors in the same order, so each knows the content of every file and writes its share of
them. The files do not depend on the number of writers. Used by ``hf_files``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import save_file

from slime.backends.training.checkpoint_files import checksum, checksums_of

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of another checkpoint, which only the writer of its file reads."""

    nbytes: int
    read: Callable[[], torch.Tensor]


Content: TypeAlias = tuple[str, torch.Tensor | StoredTensor]


def write_shards(
    weights: Iterable[Content],
    directory: Path,
    max_file_bytes: int,
    *,
    num_threads: int = 1,
    is_mine: Callable[[int], bool] = lambda _: True,
) -> tuple[list[dict[str, int]], dict[int, str]]:
    """Write files ``part-<number>`` of bounded size.

    Args:
        num_threads: files that are written at a time. They and the next one are held in memory.
        is_mine: whether this process writes the file of a number.

    Returns:
        Of each file, the names of its tensors with their bytes. And the checksums of the files of this process, by
        number. One is taken while the next file is gathered and written.
    """
    files: list[dict[str, int]] = []
    with ThreadPoolExecutor(num_threads, "writer") as writers, ThreadPoolExecutor(num_threads, "checksum") as readers:
        under_way: deque[tuple[int, Future[None]]] = deque()
        checksums: dict[int, Future[str]] = {}

        def take() -> None:
            number, written = under_way.popleft()
            written.result()
            if len(checksums) >= num_threads:  # slow storage: other ranks must not wait for all files at the end
                list(checksums.values())[-num_threads].result()
            checksums[number] = readers.submit(checksum, directory / f"part-{number}")

        for number, (sizes, tensors) in enumerate(_in_files(weights, max_file_bytes, is_mine)):
            files.append(sizes)
            if not is_mine(number):
                continue
            if len(under_way) == num_threads:
                take()
            file = directory / f"part-{number}"
            under_way.append((number, writers.submit(save_file, tensors, file, metadata={"format": "pt"})))
        while under_way:
            take()
        return files, {number: future.result() for number, future in checksums.items()}


def _in_files(
    weights: Iterable[Content], max_file_bytes: int, is_mine: Callable[[int], bool]
) -> Iterator[tuple[dict[str, int], dict[str, torch.Tensor]]]:
    """The sizes of one file's tensors after the other, with the tensors if this process writes the file.

    A file holds more than ``max_file_bytes`` only if one tensor does.
    """
    sizes: dict[str, int] = {}
    tensors: dict[str, torch.Tensor] = {}
    number = num_bytes = 0
    for name, value in weights:
        if sizes and num_bytes + value.nbytes > max_file_bytes:
            yield sizes, tensors
            sizes, tensors, num_bytes = {}, {}, 0
            number += 1
        sizes[name] = value.nbytes
        num_bytes += value.nbytes
        if is_mine(number):
            tensor = value if isinstance(value, torch.Tensor) else value.read()
            # a copy: a thread writes it while the exporter uses the memory for the next tensors
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    yield sizes, tensors


def name_shards(directory: Path, files: list[dict[str, int]], checksums: Mapping[int, str]) -> dict[str, str]:
    """Rename the parts, and write the index if there are several.

    Returns:
        The checksums of these files, by name.
    """
    if len(files) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return {"model.safetensors": checksums[0]}
    weight_map: dict[str, str] = {}
    of_finals: dict[str, str] = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
        of_finals[final] = checksums[number]
    content = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
    return of_finals | checksums_of([directory / INDEX])


def spread(ranks: list[int], most: int) -> list[int]:
    """At most ``most`` of ``ranks``, at equal distances, so that they are on different hosts."""
    count = min(len(ranks), most)
    return [ranks[index * len(ranks) // count] for index in range(count)]
