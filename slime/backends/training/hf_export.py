"""Writes a Hugging Face directory: weights in safetensors files of bounded size, and a marker that slime exported it.

    <save-hf>/model-00001-of-00002.safetensors, ...   one or several processes write them
    <save-hf>/slime_export.json                       names of all files, checksums of those with weights

All processes see the same tensors in the same order, so each knows the content of every file and writes its share of
them. The files do not depend on the number of writers.

An export replaces a directory with this marker whose entries it all wrote itself, an empty directory, or nothing.
Anything else holds files of the user. The marker is written before the directory gets its name, so every export
has it. Importing this module imports no torch. ``hf_files`` adds the other files of the directory.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from slime.backends.training.checkpoint_files import checksum, checksums_of, make_empty
from slime.utils.errors import ConfigError
from slime.utils.files import replace_directory

if TYPE_CHECKING:
    import torch

MARKER = "slime_export.json"
INDEX = "model.safetensors.index.json"
_FORMAT = 1
# written by the store of weight versions, whose full versions are exports
_WRITTEN_LATER = ("slime_weights.json",)


def begin_export(path: str) -> Path:
    """Check the target, and make the empty directory beside it that is written first.

    Raises:
        ConfigError: ``path`` holds other files than those of an export.
    """
    target = Path(path)
    if reason := foreign_content(target):
        raise ConfigError(refusal(path, reason))
    partial, old = beside(path, "partial"), beside(path, "old")
    if old.is_dir() and not target.exists():  # a process died between the two renames
        old.rename(target)
    make_empty(partial)
    return partial


def finish_export(path: str, checksums: Mapping[str, str]) -> None:
    """Mark the directory that :func:`begin_export` made, and give it its name. It replaces an earlier export."""
    write_marker(beside(path, "partial"), checksums)
    target = Path(path)
    if reason := foreign_content(target):  # the weights took their time: look again before they replace it
        raise ConfigError(refusal(path, reason))
    replace_directory(target, beside(path, "partial"), beside(path, "old"))


def beside(path: str, end: str) -> Path:
    """The hidden directory ``.<name>.<end>`` next to ``path``."""
    target = Path(path)
    return target.with_name(f".{target.name}.{end}")


def write_marker(directory: Path, checksums: Mapping[str, str]) -> None:
    """Mark ``directory``, in which everything else is written, as an export."""
    names = sorted(path.name for path in directory.iterdir())
    content = {"format": _FORMAT, "files": names, "checksums": dict(checksums)}
    (directory / MARKER).write_text(json.dumps(content, indent=2), encoding="utf-8")


def foreign_content(target: Path) -> str | None:
    """The reason why an export must not replace ``target``, as the end of a sentence. None if it may."""
    # exists() is false for a link to nothing
    if not target.exists() and not target.is_symlink():
        return None
    if target.is_symlink() or not target.is_dir():
        return "is a link" if target.is_symlink() else "is a file"
    if target.is_mount():
        return "is a mount point, which cannot be renamed"
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return None
    if MARKER not in names:
        return f"holds {names[0]} and no {MARKER}: these are other files, or an export of an older version of slime"
    try:
        content = _read_marker(target)
    except ConfigError as error:
        return f"may hold other files than those of an export: {error}"
    written = {MARKER, *_WRITTEN_LATER, *content["files"]}
    if added := [name for name in names if name not in written]:
        return f"holds {added[0]}, which no export wrote"
    return None


def export_checksums(directory: Path) -> Mapping[str, str]:
    """Checksums of an export's weight files. Empty if ``directory`` has no marker.

    Raises:
        ConfigError: the marker is damaged or cannot be read.
    """
    checksums: Mapping[str, str] = _read_marker(directory)["checksums"] if (directory / MARKER).exists() else {}
    return checksums


def refusal(path: str, reason: str) -> str:
    return (
        f"{path} {reason}. An export replaces the whole directory: name a new or an empty one, or move this one away."
    )


def _read_marker(directory: Path) -> Any:
    """The content of the marker, a dictionary with ``files`` and ``checksums``."""
    path = directory / MARKER
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None
    is_ours = isinstance(content, dict) and content.get("format") == _FORMAT
    if not is_ours or not isinstance(content.get("files"), list) or not isinstance(content.get("checksums"), dict):
        raise ConfigError(f"{path} is damaged: it must be of format {_FORMAT}, with files and checksums")
    return content


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of another checkpoint, which only the writer of its file reads."""

    nbytes: int
    read: Callable[[], torch.Tensor]


Content: TypeAlias = "tuple[str, torch.Tensor | StoredTensor]"


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
    from safetensors.torch import save_file  # imports torch

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
            tensor = value.read() if isinstance(value, StoredTensor) else value
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
