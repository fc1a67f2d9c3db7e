"""The folder of a run's temporary files: sessions of Ray, sockets of engines, files that libraries do not delete.

    <tmp>/slime-run-<random>/run.lock     held by the driver

It is deleted when the run ends, by the driver, or by the reaper if the driver is killed (``slime.utils.reaper``). If
the whole machine stops, ``slime clean`` deletes it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.utils import process
from slime.utils.errors import ConfigError
from slime.utils.files import LOCK, RunLock

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
