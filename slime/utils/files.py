"""Atomic replacement of files, checks of private directories, and a lock that allows only one live run per folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from slime.utils.errors import ConfigError, undone


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

    def discard() -> None:
        with contextlib.suppress(OSError):  # also if the disk is gone: the error of the block is more useful
            partial.unlink()

    with undone(discard):
        yield partial
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)


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


# ---- the lock. The kernel releases it (``flock``) when the holder dies. The file contains the holder. The tracker
# holds the lock of the run's folder, the driver that of ``--save``, and rank 0 of the trainer that of the weight
# versions.

logger = logging.getLogger(__name__)

LOCK = "run.lock"

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_LONGEST = 1000  # bytes of the holder's signature


class RunLock:
    """Lock of one folder, held from construction to :meth:`close`.

    Args:
        flag: the flag that decides about the folder, with its value.
        fix: advice for the error message, an imperative.

    Raises:
        ConfigError: another process holds the folder. Further locks of the same process share the first one: the
            folder is free after the last of them is closed.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, flag: str, fix: str) -> None:
        # without O_TRUNC: the content names the present holder
        self._descriptor: int | None = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, _LONGEST, 0).decode("utf-8", errors="replace")
            self.close()
            if error.errno not in _TAKEN:  # a file system without locks: the run continues unprotected
                logger.info("%s: %s; another run in this folder would not be noticed", folder / LOCK, error.strerror)
            elif holder != _signature():
                raise ConfigError(
                    f"{flag}: {_name(holder)} writes to {folder}. {fix}, or end that run first."
                ) from None
            else:  # flock conflicts also between two descriptors that one process opened, but not between duplicates
                self._descriptor = _duplicate(folder / LOCK)
                _held.add(self)
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, _signature().encode(), 0)
        _held.add(self)

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        _held.discard(self)
        # The file stays: removing it could remove the lock of the next holder.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: set[RunLock] = set()
"""The locks of this process that hold a descriptor."""


def _duplicate(path: Path) -> int | None:
    """Another descriptor of the lock that this process holds on ``path``. None if it was just closed."""
    wanted = path.stat()
    for lock in list(_held):
        if lock._descriptor is not None and os.path.samestat(os.fstat(lock._descriptor), wanted):
            return os.dup(lock._descriptor)
    return None


@functools.cache
def _token(pid: int) -> str:
    """Random id of process ``pid``. The argument makes a forked child compute another one."""
    # Host name and pid are not unique: containers that share a disk may have the same host name and pid 1.
    return uuid4().hex


def _signature() -> str:
    pid = os.getpid()
    return json.dumps({"pid": pid, "host": socket.gethostname(), "token": _token(pid)})


def lock_save(save: str) -> RunLock:
    """Lock the directory of ``--save``.

    Raises:
        ConfigError: another process holds it, or the directory cannot be written.
    """
    # Two live runs would delete each other's checkpoints.
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        return RunLock(Path(save), f"--save {save}", "Name another directory")
    except OSError as error:
        raise ConfigError(f"--save {save} cannot be written: {error.strerror or error}.") from None


def _name(holder: str) -> str:
    try:
        return "process {pid} on host {host}".format(**json.loads(holder))
    except (ValueError, KeyError, TypeError):  # the holder has locked the file and not written its name yet
        return "another process"
