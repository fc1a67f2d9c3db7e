"""One live run per folder: a lock that its driver holds, and that ends with the driver, however that comes about.

The kernel keeps the lock (``flock``), so that one of a dead process is free at once; the file says who holds it. Held
by the tracker, which writes the folder.
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

__all__ = ["FILE", "RunLock"]

logger = logging.getLogger(__name__)

FILE = "run.lock"

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_LONGEST = 1000


class RunLock:
    """Held from construction to :meth:`close`.

    Raises:
        ConfigError: another process holds the folder. One process may hold it several times.
        OSError: the file cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self._descriptor: int | None = os.open(run / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, _LONGEST, 0).decode("utf-8", errors="replace")
            self.close()
            if error.errno not in _TAKEN:  # a file system without locks
                logger.info("%s: %s; another run in this folder would not be noticed", run / FILE, error.strerror)
            elif holder != _signature():
                raise ConfigError(_refusal(run, holder)) from None
            return
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, _signature().encode(), 0)

    def close(self) -> None:
        """Let go; again is fine. The file stays: whoever removed it could remove the next holder's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@functools.cache
def _token(pid: int) -> str:
    """Of this process alone: containers that share a disk may have the same host name, and each a process 1."""
    return uuid4().hex


def _signature() -> str:
    pid = os.getpid()
    return json.dumps({"pid": pid, "host": socket.gethostname(), "token": _token(pid)})


def _refusal(run: Path, holder: str) -> str:
    try:
        who = "process {pid} on host {host}".format(**json.loads(holder))
    except (ValueError, KeyError, TypeError):  # it has the lock and has not said who it is yet
        who = "another process"
    return (
        f"--experiment-name {run.name}: {who} runs in {run} right now. Give this run a name of its own, or another "
        "--output-dir, or end the other one first."
    )
