#!/usr/bin/env python3
"""List the tensors of a checkpoint: names, shapes, precisions and sizes. --values adds statistics of their values.

    python tools/inspect_checkpoint.py /runs/iter_0000099
    python tools/inspect_checkpoint.py /models/Qwen3-4B --values --match layers.0.
    python tools/inspect_checkpoint.py /runs/hf_99 --compare /models/Qwen3-4B

Reads Hugging Face directories (safetensors) and checkpoints of trainers (Megatron's torch_dist, and FSDP's): an
iteration's directory, or one with a tracker file. --values compares the files with their checksums first. One tensor
is in memory at a time. Exit status 1 when --values finds a number that is not finite, or --compare finds a difference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.backends.megatron_utils.conversion import run_tool
from slime.backends.training.checkpoint_source import Source, inspect_checkpoint
from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Entry:
    """One tensor, not loaded yet."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    load: Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="The checkpoint.")
    parser.add_argument("--match", default="", metavar="TEXT", help="Only tensors whose name contains TEXT.")
    parser.add_argument("--values", action="store_true", help="Load the tensors: mean, deviation, largest, not finite.")
    parser.add_argument("--compare", metavar="DIR", help="Another checkpoint: where and how far do they differ?")
    options = parser.parse_args()
    entries = {name: entry for name, entry in read_entries(options.directory).items() if options.match in name}
    if not entries:
        raise ConfigError(f"{options.directory} holds no tensor whose name contains {options.match!r}.")
    if options.values:
        from slime.backends.training.checkpoint_source import verify_source

        verify_source(_source(options.directory))
    if options.compare:
        is_sound = print_differences(entries, read_entries(options.compare), options.match)
    else:
        is_sound = print_entries(entries, with_values=options.values)
    raise SystemExit(0 if is_sound else 1)


def read_entries(directory: str) -> dict[str, Entry]:
    """Every tensor by name.

    Raises:
        ConfigError: it is not a checkpoint.
    """
    if not Path(directory).is_dir():
        raise ConfigError(f"{directory}: there is no such directory.")
    if any(Path(directory).glob("*.safetensors")):
        return dict(_safetensors(Path(directory)))
    return dict(_distributed(Path(_source(directory).directory)))


def _source(directory: str) -> Source:
    if any(Path(directory).glob("*.safetensors")):
        return Source("hf", directory, "directory")
    source = inspect_checkpoint("directory", directory)
    if source is None or source.format == "hf":
        raise ConfigError(f"{directory} holds neither safetensors files nor a checkpoint of a trainer.")
    return source


def _safetensors(directory: Path) -> Iterator[tuple[str, Entry]]:
    from safetensors import SafetensorError, safe_open

    for file in sorted(directory.glob("*.safetensors")):
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ConfigError(f"{file} is damaged: {error}.") from None
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            part = opened.get_slice(name)
            shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
            # A function call binds the name: a lambda here would read the last name of the loop.
            load = _loader(opened.get_tensor, name)
            yield name, Entry(shape, dtype, _count(shape) * _width(dtype), load)


def _loader(get: Callable[[str], torch.Tensor], name: str) -> Callable[[], torch.Tensor]:
    return lambda: get(name)


def _width(dtype: str) -> int:
    """Bytes of one safetensors number: ``BF16`` -> 2, ``F8_E4M3`` -> 1, ``BOOL`` -> 1."""
    # The first number is the width in bits. The part after "_" describes the format (F8_E4M3).
    return 1 if dtype == "BOOL" else int("".join(filter(str.isdigit, dtype.split("_", maxsplit=1)[0]))) // 8


def _distributed(directory: Path) -> Iterator[tuple[str, Entry]]:
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, item in sorted(FileSystemReader(directory).read_metadata().state_dict_metadata.items()):
        if isinstance(item, TensorStorageMetadata):
            shape, dtype = tuple(item.size), item.properties.dtype
            size = _count(shape) * torch.empty((), dtype=dtype).element_size()
            load = _distributed_loader(directory, name, shape, dtype)
            yield name, Entry(shape, str(dtype).removeprefix("torch."), size, load)


def _distributed_loader(
    directory: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    def load() -> torch.Tensor:
        import torch
        import torch.distributed.checkpoint as dcp

        state = {name: torch.empty(shape, dtype=dtype)}
        # One process reads, without a process group.
        dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
        return state[name]

    return load


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def print_entries(entries: dict[str, Entry], *, with_values: bool) -> bool:
    """A line per tensor and the sum. Returns whether all numbers that were looked at are finite."""
    not_finite = 0
    for name, entry in sorted(entries.items()):
        words = [name, str(list(entry.shape)), entry.dtype, _size(entry.num_bytes)]
        if with_values:
            # In double precision, so that sums over billions of 16-bit values neither overflow nor lose digits.
            values = entry.load().double()
            bad = int((~values.isfinite()).sum())
            not_finite += bad
            # A tensor without elements has no maximum: torch raises an error.
            deviation = values.std(unbiased=False).item() if values.numel() else 0.0
            mean, largest = (values.mean().item(), values.abs().max().item()) if values.numel() else (0.0, 0.0)
            words += [f"mean {mean:.3e}", f"std {deviation:.3e}", f"max {largest:.3e}"]
            words += [f"{bad} NOT FINITE"] if bad else []
        print("  ".join(words))
    numbers, num_bytes = (
        sum(_count(e.shape) for e in entries.values()),
        sum(e.num_bytes for e in entries.values()),
    )
    print(f"{len(entries)} tensors, {numbers:,} numbers, {_size(num_bytes)}")
    return not_finite == 0


def print_differences(ours: dict[str, Entry], theirs: dict[str, Entry], match: str) -> bool:
    """A line per tensor that is not the same in both. Returns whether there is none."""
    theirs = {name: entry for name, entry in theirs.items() if match in name}
    num_equal, lines = 0, []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            lines.append(f"{name}  only in the {'first' if name in ours else 'second'}")
        elif ours[name].shape != theirs[name].shape:
            lines.append(f"{name}  {list(ours[name].shape)} against {list(theirs[name].shape)}")
        else:
            a, b = ours[name].load().double(), theirs[name].load().double()
            # NaN differs from itself: a tensor with NaN in the same place counts as different.
            if bool((a == b).all()):
                num_equal += 1
                continue
            gap, scale = (a - b).abs().max().item(), b.abs().max().item()
            share = (a != b).double().mean().item()
            lines.append(f"{name}  max difference {gap:.3e} (largest value {scale:.3e}), {share:.2%} of its numbers")
    print("\n".join([*lines, f"{num_equal} tensors are equal, {len(lines)} differ"]))
    return not lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.2f} MiB"


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
