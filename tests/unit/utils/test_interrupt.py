"""Ctrl-C ends every wait, also if Python dropped the exception. The second one ends the process."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading

import pytest

from slime.ray.run.prefetch import PrefetchedRollouts
from slime.ray.run.restart import exit_status
from slime.utils.async_utils import Deadline, Interrupted, acknowledge, interruptible, raise_if_interrupted, wait_until
from tests.limits import unloaded_time


class Swallows:
    """Python prints an exception that is raised in a destructor, and continues."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self._number)
        for _ in range(1000):  # the handler runs between two of these
            pass


def lose_an_interruption(number: signal.Signals = signal.SIGINT) -> None:
    swallows = Swallows(number)
    del swallows


lost = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@lost
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_that_a_destructor_swallowed_ends_the_next_wait(number, status):
    with interruptible():
        lose_an_interruption(number)
        started = unloaded_time()
        with pytest.raises(Interrupted) as caught:
            wait_until(lambda: False, Deadline(600, "something that never comes"))
        assert unloaded_time() < started + 5
        assert caught.value.status == status


@lost
@pytest.mark.parametrize("wait", ["take", "engines_idle"])
def test_waits_for_rollouts_ahead_look_at_it_too(wait):
    release: queue.Queue[int] = queue.Queue()
    prefetched = PrefetchedRollouts(lambda rollout_id: release.get(), [0], capacity=1, timeout_s=30.0)
    try:
        with interruptible():
            lose_an_interruption()
            with pytest.raises(Interrupted):
                prefetched.take(0) if wait == "take" else prefetched.engines_idle().__enter__()
    finally:
        prefetched.stop()
        release.put(0)


@lost
def test_waits_that_the_stop_itself_needs_are_not_ended():
    with interruptible():
        lose_an_interruption()
        acknowledge()
        ready = threading.Event()
        threading.Timer(0.1, ready.set).start()
        wait_until(ready.is_set, Deadline(600, "the stop"))


def test_nothing_is_left_of_an_interruption_after_the_block_and_the_handlers_are_the_old_ones():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted), interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    raise_if_interrupted()
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_is_status_143():
    with pytest.raises(SystemExit) as caught, exit_status():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143


STUBBORN = """
import os, signal, time
from slime.utils import async_utils
async_utils._FORWARDED_S = {forwarded}
with async_utils.interruptible():
    for _ in range(2):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep({pause})
        except KeyboardInterrupt:
            time.sleep({pause})
    raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("forwarded", "pause", "status"),
    [(0.0, 0.01, 130), (30.0, 0.0, 7)],
    ids=["the second Ctrl-C ends at once", "a signal that a wrapper passed on is not a second one"],
)
def test_a_second_interruption(forwarded, pause, status):
    source = STUBBORN.format(forwarded=forwarded, pause=pause)
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == status
