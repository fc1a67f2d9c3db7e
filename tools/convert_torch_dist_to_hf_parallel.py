#!/usr/bin/env python3
"""Convert a Megatron checkpoint (torch_dist) back into a Hugging Face directory, several files at a time.

    python tools/convert_torch_dist_to_hf_parallel.py \\
        --input-dir /run/iter_0000099 --output-dir /run/hf --origin-hf-dir /models/Qwen3-4B

Writes what convert_torch_dist_to_hf.py writes, byte for byte. --load-max-workers files of the checkpoint are read ahead
into the page cache while the model is built, which pays on a network file system, and --save-max-workers safetensors
files are written at a time while the next ones are put together: up to that many times --chunk-size stay in memory.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

# For convert_torch_dist_to_hf, which is a script beside this one and not in a package.
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from convert_torch_dist_to_hf import add_options, convert

from slime.backends.megatron_utils.conversion import read_options, run_tool
from slime.backends.training.checkpoint_source import inspect_checkpoint
from slime.utils.errors import ConfigError

_PIECE_BYTES = 16 * 1024**2


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument("--load-max-workers", type=int, default=2, help="Files that are read ahead at a time.")
    parser.add_argument("--save-max-workers", type=int, default=16, help="Files that are written at a time.")


def main() -> None:
    args = read_options(_add_options, __doc__)
    for flag, value in (
        ("--load-max-workers", args.load_max_workers),
        ("--save-max-workers", args.save_max_workers),
    ):
        if value < 1:
            raise ConfigError(f"{flag} {value} must be at least 1.")
    source = inspect_checkpoint("--input-dir", args.input_dir)
    with _read_ahead(Path(args.input_dir if source is None else source.directory), args.load_max_workers):
        convert(args, num_writers=args.save_max_workers)


@contextmanager
def _read_ahead(directory: Path, num_readers: int) -> Iterator[None]:
    """Read the files of ``directory`` in the background until the block ends."""
    is_over = threading.Event()

    def read(path: Path) -> None:
        with path.open("rb") as file:
            # The bytes are dropped: reading puts them into the page cache of the kernel.
            while not is_over.is_set() and file.read(_PIECE_BYTES):
                pass

    with ThreadPoolExecutor(num_readers, "reader") as pool:
        for path in sorted(directory.glob("*.distcp")):
            pool.submit(read, path)
        try:
            yield
        finally:
            # Leaving the pool waits for its threads: without the event they would read the rest of the files.
            is_over.set()


if __name__ == "__main__":
    raise SystemExit(run_tool(main))
