"""Ends what a run left behind: every process that descended from the driver, and their shared memory.

    python -m slime.utils.reaper PID

Started by the driver when it starts a Ray cluster of its own, in a session of its own, so that Ctrl-C does not reach
it. While the driver lives it notes the driver's descendants; when the driver is gone, however that came about, it kills
those that are left. Ray's daemons follow a killed driver by themselves, but its agents take half a minute to. New files
in /dev/shm that the run's processes had mapped go as well: a killed engine cannot remove its own.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from slime.utils.process import has_ended, mapped_files

_SCAN_EVERY_S = 1.0
_GRACE_S = 1.0
_POLL_S = 0.05
_PATIENCE_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")
_LOOKS = 5
_held: list[int] = []
"""Write ends of the pipes that reapers wait on; closed by the end of this process."""


def start_reaper() -> None:
    """Have every descendant of this process killed once this process has ended."""
    read_end, write_end = os.pipe()
    _held.append(write_end)
    subprocess.Popen(
        [sys.executable, "-m", "slime.utils.reaper", str(os.getpid())],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_end)


def reap(processes: set[psutil.Process], *, grace_s: float = _GRACE_S) -> None:
    """Give ``processes`` some time to end by themselves, then kill those that have not.

    psutil compares start times: a process that took over the number of an ended one is left alone.
    """
    left = _left_after(processes, grace_s)
    deadline = time.monotonic() + _PATIENCE_S
    while left and time.monotonic() < deadline:
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        left = _left_after(left, 0.2)


def _left_after(processes: set[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """Those that have not ended, once all have or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        processes = {process for process in processes if not has_ended(process)}
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(_POLL_S)


class SharedMemory:
    """The files of ``directory`` that appear from now on and are mapped by the processes of one run.

    A new file is looked for in the processes' memory maps a few times; most of the time there is none, and a look costs
    one listing of the directory.
    """

    def __init__(self, directory: Path = _SHARED_MEMORY) -> None:
        self._directory = directory
        self._looks_left = dict.fromkeys(self._names(), 0)
        self.mapped: set[str] = set()

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self._directory))
        except OSError:
            return set()  # not every system has one

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Find out which of the new files belong to ``processes``."""
        new = {name for name in self._names() - self.mapped if self._looks_left.setdefault(name, _LOOKS) > 0}
        if not new:
            return
        for process in processes:
            self.mapped |= new & mapped_files(process.pid, self._directory)
        for name in new:
            self._looks_left[name] -= 1

    def remove(self) -> None:
        """Delete the files that were found. Whoever still has one mapped keeps what is in it."""
        for name in self.mapped:
            (self._directory / name).unlink(missing_ok=True)


def _descendants(driver: psutil.Process) -> set[psutil.Process]:
    try:
        return {process for process in driver.children(recursive=True) if process.pid != os.getpid()}
    except psutil.NoSuchProcess:
        return set()


def _with_their_children(processes: set[psutil.Process]) -> set[psutil.Process]:
    found = set(processes)
    for process in processes:
        found |= _descendants(process)
    return found


def main() -> None:
    driver = psutil.Process(int(sys.argv[1]))
    known: set[psutil.Process] = set()
    memory = SharedMemory()
    # nobody writes to the pipe: it becomes readable when the driver's end is closed
    while not select.select([0], [], [], _SCAN_EVERY_S)[0]:
        known = {process for process in known if process.is_running()} | _descendants(driver)
        memory.look(known)
    known = _with_their_children(known)
    memory.look(known)
    reap(known)
    memory.remove()


if __name__ == "__main__":
    main()
