"""Atomic replacement of files, private directories, the lock of a run's folder, and its folder of temporary files.

    <tmp>/slime-run-<random>/            sessions of Ray, sockets of engines, files that libraries do not delete
    <tmp>/slime-run-<random>/run.lock    held by the driver

The folder is deleted when the run ends, by the driver, or by the reaper if the driver is killed
(``slime.utils.reaper``). If the whole machine stops, ``slime clean`` deletes it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from slime.utils import process
from slime.utils.errors import ConfigError, undone

_PARTIAL = re.compile(r"\..+\.\d+\.partial")
_OLD = timedelta(days=1)  # a live writer changes its file more often, also by the clock of a file server


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Context that yields a temporary path and renames it to ``path`` at the end of the block.

    A reader of ``path`` finds the old content or the new one. The temporary file is deleted if the block raises. The
    folder of ``path`` is created if it does not exist.

    Args:
        sync: flush the new content to the disk before the rename, so that the guarantee also covers a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
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


@functools.cache  # once per folder of a process
def _sweep(folder: Path) -> None:
    """Delete the temporary files of writers that were killed."""
    # Not by the pid in the name: on a shared disk it may be that of a live process of another host or container.
    oldest = time.time() - _OLD.total_seconds()
    for left in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):  # another process deletes it, too
            if _PARTIAL.fullmatch(left.name) and left.is_file() and left.stat().st_mtime < oldest:
                left.unlink()


def replace_directory(target: Path, new: Path, old: Path) -> None:
    """Give the directory ``new`` the name ``target``, and delete the directory that had it.

    A reader finds the one or the other at ``target``. On file systems that cannot exchange two names (NFS), there is
    none between two renames.

    Args:
        old: unused name in the same folder, for the directory that had the name. If the process is killed, one is left
            at ``new`` or ``old``.
    """
    shutil.rmtree(old, ignore_errors=True)
    if not target.exists():
        new.rename(target)
    elif not _exchange(new, target):
        target.rename(old)
        with undone(lambda: old.rename(target)):
            new.rename(target)
    for replaced in (new, old):
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once. False if the file system, the kernel or the C library cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    here = -100  # AT_FDCWD; the last argument is RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), 2) == 0)


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


PREFIX = "slime-run-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder for temporary files of this process and its children. Deleted after the block."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=process.temporary_base()))
    lock = RunLock(folder, str(folder), "It is the folder of another run")
    values = process.temporary_variables(folder)
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    chosen, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = chosen
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        lock.close()
        remove(folder)


def remove(folder: Path) -> None:
    """Delete ``folder``, also while processes still write into it: the reaper deletes the rest after their end."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class LeftFolder:
    """A folder of a run of this user.

    Attributes:
        num_bytes: of its files.
        used_by: why it is not deleted. None if the run has ended.
    """

    path: Path
    num_bytes: int
    used_by: str | None


def left_folders() -> list[LeftFolder]:
    """The folders of all runs of this user on this machine, with those of live runs."""
    bases = sorted({process.temporary_base(), Path(tempfile.gettempdir()), process.SHORTEST_BASE})
    found = [path for one in bases for path in sorted(one.glob(f"{PREFIX}*")) if _is_ours(path)]
    return [LeftFolder(path, _num_bytes(path), _used_by(path)) for path in found]


def _is_ours(path: Path) -> bool:
    """Made by :func:`scratch_folder` for this user: another user or program cannot make us delete its files."""
    try:
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and (path / LOCK).is_file()
    except OSError:
        return False


def _used_by(path: Path) -> str | None:
    try:
        RunLock(path, str(path), "").close()  # the kernel releases the lock of a dead driver, in any container
    except ConfigError:
        return "its run is alive"
    except OSError as error:
        return f"its lock cannot be read: {error}"
    # Engines and routers have a folder inside this one.
    inside = [f"{process.TMPDIR}={path}{end}".encode() for end in ("\0", "/")]
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    mine = [pid for pid in pids if any(map(_environment(pid).__contains__, inside))]
    return f"its processes are alive: {', '.join(map(str, mine))}" if mine else None


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:  # another user's process, or one that has ended
        return b""


def _num_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def clean(words: Sequence[str]) -> int:
    """``slime clean``: list the folders of ended runs and delete them. Returns 1 if one could not be deleted."""
    parser = argparse.ArgumentParser(
        prog="slime clean",
        description="Delete the temporary folders (slime-run-...) of your runs on this machine that have ended. A run "
        "deletes its folder itself, unless the machine stops. Folders of live runs stay.",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the folders and delete nothing")
    is_dry = parser.parse_args(list(words)).dry_run
    folders, failed = left_folders(), 0
    for folder in folders:
        size = f"{folder.num_bytes / 2**20:.1f} MiB"
        if folder.used_by is not None:
            print(f"kept     {folder.path}  {size}  {folder.used_by}")
            continue
        if not is_dry:
            remove(folder.path)
        is_left = not is_dry and folder.path.exists()
        failed += is_left
        print(f"{'found' if is_dry else 'not deleted' if is_left else 'deleted'}  {folder.path}  {size}")
    if not folders:
        print("no temporary folder of a run is left")
    return int(failed > 0)
