"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a file to write in the block; at its end the file becomes ``path``, whose folder is made if need be.

    A reader of ``path`` finds the old content or the new one. Of a block that raises nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # also a disk that went away: what the block raised says more
            partial.unlink()
