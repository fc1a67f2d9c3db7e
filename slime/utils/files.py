"""Files that appear complete or not at all, and directories that are ours alone."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """The name of a file to write in the block; at its end the file becomes ``path``, whose folder is made if need be.

    A reader of ``path`` finds the old content or the new one. Of a block that raises nothing is left.

    Args:
        sync: the new content is on the disk first, so that this is true after a power failure as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # also a disk that went away: what the block raised says more
            partial.unlink()


def is_private_directory(directory: Path) -> bool:
    """Make ``directory`` if need be, and say whether only this user can change what is in it.

    What is executed from there later is safe only if the same is true of the directory above, for its owner could put
    another one in this place.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return is_ours and os.access(directory, os.W_OK)
