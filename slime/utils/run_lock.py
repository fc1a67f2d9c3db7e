"""Lock that allows only one live run per folder.

The kernel releases the lock (``flock``) when the holder dies. The file contains the holder. The tracker holds the lock
of the run's folder, the driver that of ``--save``, and rank 0 of the trainer that of the weight versions.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import socket
from pathlib import Path
from uuid import uuid4

from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

FILE = "run.lock"

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
        self._descriptor: int | None = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, _LONGEST, 0).decode("utf-8", errors="replace")
            self.close()
            if error.errno not in _TAKEN:  # a file system without locks: the run continues unprotected
                logger.info("%s: %s; another run in this folder would not be noticed", folder / FILE, error.strerror)
            elif holder != _signature():
                raise ConfigError(
                    f"{flag}: {_name(holder)} writes to {folder}. {fix}, or end that run first."
                ) from None
            else:  # flock conflicts also between two descriptors that one process opened, but not between duplicates
                self._descriptor = _duplicate(folder / FILE)
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
