"""The report on a process that died or does not answer, with real actors: who, how, since when, and where."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from slime.ray.watch import get, heartbeat, raise_if_dead
from slime.ray.watch.heartbeat import SILENCE_S, processes_of, register_process
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import DeadlineExceeded, ProcessDied
from tests.limits import unloaded_time

pytestmark = pytest.mark.alone


class Worker:
    def __init__(self, name: str, silence_s: float = SILENCE_S) -> None:
        register_process(name, silence_s)

    def pid(self) -> int:
        return os.getpid()

    def say(self, text: str) -> None:
        os.write(2, text.encode())

    def wait(self) -> None:
        wait_until(lambda: False, Deadline(100.0, "something that never comes"))

    def keep_the_interpreter(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)  # native code: no other thread of Python runs meanwhile

    def fail_after(self, seconds: float) -> None:
        time.sleep(seconds)
        raise RuntimeError("Connection closed by peer")

    def wait_for(self, peer: Any) -> None:
        get(peer.wait.remote(), 60.0, "its peer to answer")


@pytest.fixture(scope="module")
def actors():
    """Make actors in one Ray for all tests."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    actor = ray.remote(Worker)

    def make(*names: str, silence_s: float = SILENCE_S) -> list[Any]:
        return [actor.options(num_cpus=0).remote(name, silence_s) for name in names]

    try:
        yield make
    finally:
        ray.shutdown()


def kill(actor: Any) -> None:
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)


def test_a_death_is_told_with_its_last_lines_and_the_stacks_of_those_who_were_left(actors):
    left, dies = actors("rank 0", "rank 1")
    _, _, pid = ray.get([left.pid.remote(), dies.say.remote("took step 7\n"), dies.pid.remote()])
    refs = [left.wait.remote(), dies.wait.remote()]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessDied) as caught:
        get(refs, 30.0, "both to train")
    message = str(caught.value)
    assert "rank 1 (pid " in message.splitlines()[0]
    assert f"died while the driver (pid {os.getpid()}) waited" in message
    assert "s for both to train: it ended without a trace, as after SIGKILL" in message
    assert "took step 7" in message
    assert "rank 0 (pid" in message
    assert "slime/utils/async_utils.py" in message
    assert "in wait_until" in message
    ray.kill(left)


def test_when_a_death_makes_peers_fail_first_the_death_is_told(actors):
    fails, dies = actors("rank 0", "rank 1")
    kill(dies)
    refs = [fails.fail_after.remote(0.0), dies.wait.remote()]
    with pytest.raises(ProcessDied, match=r"rank 1 \(pid"):
        get(refs, 30.0, "both to train")


def test_an_error_without_a_death_stays_what_it_is(actors):
    fails, waits = actors("rank 0", "rank 1")
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        get([fails.fail_after.remote(0.0), waits.wait.remote()], 30.0, "both to train")
    ray.kill(waits)


def test_a_deadline_names_who_did_not_answer_and_where_it_is(actors):
    quick, slow = actors("rank 0", "rank 1")
    ray.get([quick.pid.remote(), slow.pid.remote()])  # the start of an actor takes seconds
    with pytest.raises(DeadlineExceeded) as caught:
        get([quick.pid.remote(), slow.wait.remote()], 3.0, "both to train", "--train-timeout")
    message = str(caught.value)
    assert message.startswith(f"the driver (pid {os.getpid()}) gave up after 3.")
    assert "waiting for both to train. 1 of 2 calls have not returned: rank 1 (pid " in message
    assert "--train-timeout" in message
    assert "in wait_until" in message
    assert "rank 0" not in message
    ray.kill(slow)


def test_a_death_that_somebody_else_waited_for_reaches_the_driver_as_one(actors):
    middle, dies = actors("the middle", "the last")
    kill(dies)
    with pytest.raises(ProcessDied, match=r"the last \(pid .* died while the middle \(pid .* for its peer to answer"):
        get(middle.wait_for.remote(dies), 30.0, "the middle")


def test_the_dead_are_found_among_the_busy(actors):
    busy, dies = actors("rank 0", "rank 1")
    busy.wait.remote()
    raise_if_dead([busy], "nothing")
    kill(dies)
    with pytest.raises(ProcessDied, match="rank 1"):
        raise_if_dead([busy, dies], "a run that failed")
    ray.kill(busy)


def test_a_stopped_process_is_named_and_killed_in_seconds_although_it_has_not_ended(actors):
    left, stops = actors("rank 0", "rank 1", silence_s=2.0)
    _, pid = ray.get([left.pid.remote(), stops.pid.remote()])
    refs = [left.wait.remote(), stops.wait.remote()]
    os.kill(pid, signal.SIGSTOP)
    started = unloaded_time()
    with pytest.raises(ProcessDied) as caught:
        get(refs, 60.0, "both to train")
    assert unloaded_time() < started + 10
    message = str(caught.value)
    assert message.startswith(f"rank 1 (pid {pid} on ")
    assert "for both to train: it was stopped, as by SIGSTOP: no sign of life for " in message
    assert "rank 0 (pid" in message
    assert "in wait_until" in message
    wait_until(lambda: not psutil.pid_exists(pid), Deadline(600, "the stopped process to be gone"))
    ray.kill(left)


def test_native_code_that_hangs_is_told_from_python_that_waits(actors):
    waits, hangs = actors("rank 0", "rank 1", silence_s=1.0)
    ray.get([waits.pid.remote(), hangs.pid.remote()])
    refs = [waits.wait.remote(), hangs.keep_the_interpreter.remote(100)]
    with pytest.raises(ProcessDied, match=r"^rank 1 .* it hangs in native code, without using a processor"):
        get(refs, 60.0, "both to train")
    ray.kill(waits)


def test_a_process_of_another_node_is_looked_at_and_killed_by_that_node(actors, monkeypatch):
    (stopped,) = actors("rank 0")
    pid = ray.get(stopped.pid.remote())
    (process,) = processes_of([stopped.wait.remote()])
    monkeypatch.setattr(heartbeat.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "another"))
    os.kill(pid, signal.SIGSTOP)
    assert heartbeat._on_node_of(process, heartbeat._usage).state == psutil.STATUS_STOPPED
    heartbeat._on_node_of(process, heartbeat._kill)
    wait_until(lambda: not psutil.pid_exists(pid), Deadline(600, "the stopped process to be gone"))
