"""Atomic replacement of files, and checks of private directories."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Context that yields a temporary path and renames it to ``path`` at the end of the block.

    A reader of ``path`` finds the old content or the new one. The temporary file is deleted if the block raises. The
    folder of ``path`` is created if it does not exist.

    Args:
        sync: flush the new content to the disk before the rename, so that the guarantee also covers a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder: a rename is atomic only within a file system. The pid keeps parallel writers apart.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # also if the disk is gone: the error of the block is more useful
            partial.unlink()


def is_private_directory(directory: Path) -> bool:
    """Create ``directory`` if it does not exist. Returns whether only this user can change its content.

    Before files of ``directory`` are executed, check its parent as well: the owner of the parent can replace
    ``directory``.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()  # not stat: a symbolic link to a foreign directory must not pass
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return is_ours and os.access(directory, os.W_OK)
