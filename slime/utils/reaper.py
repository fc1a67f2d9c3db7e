"""Ends what a run left behind: every process that descended from the driver.

    python -m slime.utils.reaper PID

Started by the driver when it starts a Ray cluster of its own, in a session of its own, so that Ctrl-C does not reach
it. While the driver lives it notes the driver's descendants; when the driver is gone, however that came about, it kills
those that are left. Ray's daemons follow a killed driver by themselves, but its agents take half a minute to.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import psutil

__all__ = ["reap", "start_reaper"]

_SCAN_EVERY_S = 1.0
_GRACE_S = 1.0
_PATIENCE_S = 10.0
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
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    deadline = time.monotonic() + _PATIENCE_S
    while left and time.monotonic() < deadline:
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, left = psutil.wait_procs(left, timeout=0.2)


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
    # nobody writes to the pipe: it becomes readable when the driver's end is closed
    while not select.select([0], [], [], _SCAN_EVERY_S)[0]:
        known = {process for process in known if process.is_running()} | _descendants(driver)
    reap(_with_their_children(known))


if __name__ == "__main__":
    main()
