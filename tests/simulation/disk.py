"""The simulated disk: real files in a folder in memory, whose operations may be slow, fail, or be the last ones.

Every operation on a file of the world is an event, at which a process can be killed. A dead process changes no file.
A power failure takes what was not flushed: files lose the content after their last ``fsync``. The order of
operations on names is kept, as by a journal.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.simulation.threads import Namespace
from tests.simulation.world import World, world

_PID = f".{os.getpid()}"  # part of the names of partial files


class Disk:
    """
    Attributes:
        full_until, slow_until: virtual times.
    """

    def __init__(self, here: World, root: Path) -> None:
        self._world, self.root = here, root
        self.full_until = self.slow_until = 0.0
        self._prefix = f"{root}/"
        self._flushed: dict[int, bytes] = {}

    def step(self, what: str, path: object, *, grows: bool = True) -> None:
        """One operation of the running thread. Raises if it does not happen."""
        here = self._world
        if not str(path).startswith(self._prefix):
            return
        here.check()
        name = str(path)[len(self._prefix) :].replace(_PID, "")
        here.note(f"disk {here.current.process.name} {what} {name}")
        here.check()  # the event may have killed this process
        if here.now < self.slow_until:
            here.sleep(here.random.random() * 2.0)
        if grows and here.now < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def flush(self, descriptor: int) -> None:
        self._flushed[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def sync_tree(self, directory: Path) -> None:
        """Flush all files of a directory, as trainers do with their shards."""
        for path in directory.iterdir():
            self._flushed[path.stat().st_ino] = path.read_bytes()

    def lose_power(self) -> None:
        """Files lose all that was not flushed. Called after the processes have died."""
        for path in sorted(self.root.rglob("*")):
            if not path.is_file() or path.suffix == ".lock":
                continue
            kept = self._flushed.get(path.stat().st_ino, b"")
            content = path.read_bytes()
            if kept != content and self._world.chance(0.7):
                # what was appended may be on the disk in part
                is_longer = content.startswith(kept)
                size = len(kept) + (self._world.random.randrange(len(content) - len(kept) + 1) if is_longer else 0)
                with path.open("wb") as file:  # not write_bytes(), an operation of a process
                    file.write(content[:size] if is_longer else kept)
                self._world.note(f"power lost {path.name.replace(_PID, '')} {size} of {len(content)}")


def _disk() -> Disk | None:
    here = World.current_world
    return None if here is None else here.globals.get("disk")


def _write(descriptor: int, data: bytes) -> int:
    disk = _disk()
    if disk is None:
        return os.write(descriptor, data)
    try:
        disk.step("append", os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        half = len(data) // 2  # a full disk takes a part
        return os.write(descriptor, data[:half]) if half and world().chance(0.5) else _no_space()
    return os.write(descriptor, data)


def _no_space() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fsync(descriptor: int) -> None:
    disk = _disk()
    if disk is not None:
        disk.step("flush", os.readlink(f"/proc/self/fd/{descriptor}"), grows=False)
        disk.flush(descriptor)


OS = Namespace(os, write=_write, fsync=_fsync)


@contextmanager
def watched() -> Iterator[None]:
    """Make the writing methods of ``Path`` and ``shutil.rmtree`` operations of the disk."""
    real: dict[str, Any] = {
        name: getattr(Path, name) for name in ("write_text", "write_bytes", "replace", "rename", "unlink")
    }
    rmtree = shutil.rmtree

    def wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: Path, *args: Any, **kwargs: Any) -> Any:
            disk = _disk()
            if disk is not None:
                disk.step(name, self, grows=name.startswith("write"))
            return method(self, *args, **kwargs)

        return operation

    def remove(path: Any, *args: Any, **kwargs: Any) -> None:
        disk = _disk()
        if disk is not None:
            disk.step("rmtree", path, grows=False)
        rmtree(path, *args, **kwargs)

    for name, method in real.items():
        setattr(Path, name, wrapped(name, method))
    shutil.rmtree = remove  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(Path, name, method)
        shutil.rmtree = rmtree
