"""What a killed driver leaves behind is ended, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

SLEEP = "import time; time.sleep(100)"
DRIVER = f"""
import subprocess, sys, time
from slime.utils.reaper import start_reaper
start_reaper()
detached = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
time.sleep(3)
print(detached.pid, flush=True)
time.sleep(100)
"""


def test_descendants_of_a_killed_driver_are_ended_and_others_are_not():
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        left_behind = psutil.Process(int(driver.stdout.readline()))
        reapers = [child for child in psutil.Process(driver.pid).children() if "slime.utils.reaper" in child.cmdline()]
        assert len(reapers) == 1
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        deadline = time.monotonic() + 15
        while (left_behind.is_running() or reapers[0].is_running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left_behind.is_running()
        assert not reapers[0].is_running(), "the reaper ends as well"
        assert bystander.poll() is None
    finally:
        driver.kill()
        bystander.kill()
        bystander.wait()
