"""The remaining processes of a killed driver are ended, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from slime.utils.reaper import SharedMemory, reap
from tests.limits import unloaded_time

SLEEP = "import time; time.sleep(100)"
HOLD = """
import mmap, sys, time
files = [open(path, "r+b") for path in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0) for file in files]
print("mapped", flush=True)
time.sleep(100)
"""
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
        deadline = unloaded_time() + 15
        while (left_behind.is_running() or reapers[0].is_running()) and unloaded_time() < deadline:
            time.sleep(0.05)
        assert not left_behind.is_running()
        assert not reapers[0].is_running(), "the reaper ends as well"
        assert bystander.poll() is None
    finally:
        driver.kill()
        bystander.kill()
        bystander.wait()


def test_what_has_ended_unnoticed_by_its_parent_is_not_waited_for():
    start_and_look_away = (
        "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', '']).pid, flush=True); "
        "time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", start_and_look_away], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        deadline = unloaded_time() + 15
        while process.status() != psutil.STATUS_ZOMBIE:
            assert unloaded_time() < deadline
            time.sleep(0.01)
        started = unloaded_time()
        reap({process}, grace_s=5.0)
        assert unloaded_time() < started + 2.5
    finally:
        parent.kill()
        parent.wait()


def test_shared_memory_of_the_run_is_removed_and_that_of_others_is_not(tmp_path):
    (tmp_path / "before").write_bytes(b"x" * 4096)
    memory = SharedMemory(tmp_path)
    for name in ("ours", "theirs"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "before", tmp_path / "ours"], stdout=-1)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        memory.look([psutil.Process(holder.pid)])
    finally:
        holder.kill()
        holder.wait()
    memory.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "theirs"]
