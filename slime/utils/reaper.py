"""Cleanup process of a run: ends all descendants of the driver after its end, and deletes their temporary files.

    python -m slime.utils.reaper PID [FOLDER]

The driver starts the reaper together with a local Ray cluster. While the driver lives, the reaper collects the driver's
descendants. After the end of the driver, also by SIGKILL, it kills the remaining ones. Ray's daemons end with a killed
driver, but its agents take half a minute. The reaper also deletes new files in /dev/shm that the run's processes had
mapped, because a killed engine cannot delete them, and the folder of the run's temporary files (``utils.files``).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from slime.utils.process import has_ended, mapped_files

_SCAN_EVERY_S = 1.0
_GRACE_S = 1.0  # before the first SIGKILL
_POLL_S = 0.05
_PATIENCE_S = 10.0  # of repeated SIGKILLs: a process in an uninterruptible wait does not end at once
_SHARED_MEMORY = Path("/dev/shm")
_LOOKS = 5  # scans until a new file counts as a file of another program
# Write ends of the pipes that reapers wait on. Never closed here: the kernel closes them when this process ends.
_held: list[int] = []


def start_reaper(folder: Path | None = None) -> None:
    """Have every descendant of this process killed, and ``folder`` deleted, once this process has ended."""
    read_end, write_end = os.pipe()
    _held.append(write_end)
    subprocess.Popen(
        [sys.executable, "-m", "slime.utils.reaper", str(os.getpid()), *([] if folder is None else [str(folder)])],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C of the terminal must not reach the reaper
    )
    os.close(read_end)


def reap(processes: set[psutil.Process], *, grace_s: float = _GRACE_S) -> None:
    """Wait ``grace_s`` seconds for the end of ``processes``, then kill the remaining ones."""
    left = _left_after(processes, grace_s)
    deadline = time.monotonic() + _PATIENCE_S
    while left and time.monotonic() < deadline:
        for process in left:
            try:
                process.kill()  # psutil compares start times: a new process with a reused pid is not killed
            except psutil.NoSuchProcess:
                continue
        left = _left_after(left, 0.2)


def _left_after(processes: set[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """The processes that are still running after ``timeout_s``. Returns earlier if all have ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        processes = {process for process in processes if not has_ended(process)}
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(_POLL_S)


class SharedMemory:
    """Files of ``directory`` that are created from now on and mapped by the processes of one run."""

    def __init__(self, directory: Path = _SHARED_MEMORY) -> None:
        self._directory = directory
        # Files that exist already belong to other programs: no scans.
        self._looks_left = dict.fromkeys(self._names(), 0)
        self.mapped: set[str] = set()

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self._directory))
        except OSError:
            return set()  # some systems have no /dev/shm

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Add the new files that ``processes`` have mapped to ``mapped``."""
        new = {name for name in self._names() - self.mapped if self._looks_left.setdefault(name, _LOOKS) > 0}
        if not new:
            return  # the usual case: costs one directory listing and no memory map
        for process in processes:
            self.mapped |= new & mapped_files(process.pid, self._directory)
        for name in new:
            self._looks_left[name] -= 1

    def remove(self) -> None:
        """Delete the files in ``mapped``. Processes that still have one mapped keep its content."""
        for name in self.mapped:
            (self._directory / name).unlink(missing_ok=True)


def _descendants(driver: psutil.Process) -> set[psutil.Process]:
    try:
        return {process for process in driver.children(recursive=True) if process.pid != os.getpid()}
    except psutil.NoSuchProcess:
        return set()


def with_their_children(processes: set[psutil.Process]) -> set[psutil.Process]:
    """``processes`` and all their descendants."""
    found = set(processes)
    for process in processes:
        found |= _descendants(process)
    return found


def main() -> None:
    known: set[psutil.Process] = set()
    driver = None
    with contextlib.suppress(psutil.NoSuchProcess):  # it was killed while this process started
        driver = psutil.Process(int(sys.argv[1]))
    memory = SharedMemory()
    # The pipe never carries data. It becomes readable when the kernel closes the driver's end.
    while driver is not None and not select.select([0], [], [], _SCAN_EVERY_S)[0]:
        # Collected while the driver lives: afterwards its orphans are children of init.
        known = {process for process in known if process.is_running()} | _descendants(driver)
        memory.look(known)
    known = with_their_children(known)  # forked since the last scan
    memory.look(known)
    reap(known)
    memory.remove()
    for folder in sys.argv[2:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
