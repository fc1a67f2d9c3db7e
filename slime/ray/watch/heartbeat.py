"""Who the processes of a run are, and whether they live: a card for each actor, and a pulse that anyone can feel.

Every actor introduces itself when it starts: name, pid, node, log and a file that its Python stacks are written to on
SIGUSR2. The card is kept in Ray's own store, so it can be read when the actor is gone. From then on a thread of the
actor counts in the same store: a process that is stopped, or whose interpreter is stuck in native code, counts no more.

Read by ``blame`` (the reports) and ``pulse`` (who has stopped counting).
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import psutil
import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put  # as in Ray's own libraries
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SILENCE_S = 10.0
"""Default of --heartbeat-timeout."""

STACK_SIGNAL = signal.SIGUSR2
_NAMESPACE = "slime.processes"
_HEARTBEATS = 5
"""Beats in the time after which silence is a sign."""

_stack_file: list[IO[str]] = []
"""Keeps the file open that the signal handler writes to."""


@dataclass(frozen=True)
class ProcessInfo:
    """How to find a process of the run.

    Attributes:
        name: what messages call it.
        pid: valid on the node ``host``.
        created: the process's start in seconds since 1970, to tell it from another one with its number.
        log: file of its standard error; empty where that is no file.
        stack: file that SIGUSR2 makes it write its Python stacks to.
        actor_id: Ray's name of it.
        node_id: Ray's name of the node.
        silence_s: seconds without a beat after which something is wrong with it; 0 when it does not beat.
    """

    name: str
    pid: int
    host: str
    created: float
    log: str
    stack: str
    actor_id: str
    node_id: str
    silence_s: float

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"

    @property
    def is_here(self) -> bool:
        """Whether it lives, on this node."""
        try:
            return self.host == _host() and psutil.Process(self.pid).create_time() == self.created
        except psutil.NoSuchProcess:
            return False


def register_process(name: str, silence_s: float = SILENCE_S) -> None:
    """In an actor's constructor: from now on others know this process by ``name``, and feel its pulse."""
    if not ray.is_initialized():
        return  # the body of an actor, used without Ray
    _stack_file[:] = [_nameless_file()]
    faulthandler.register(STACK_SIGNAL, _stack_file[0], all_threads=True)
    log = os.path.realpath("/proc/self/fd/2")
    context = ray.get_runtime_context()
    process = ProcessInfo(
        name,
        os.getpid(),
        _host(),
        psutil.Process().create_time(),
        log if Path(log).is_file() else "",
        f"/proc/{os.getpid()}/fd/{_stack_file[0].fileno()}",
        str(context.get_actor_id()),
        str(context.get_node_id()),
        silence_s,
    )
    _internal_kv_put(process.actor_id, json.dumps(dataclasses.asdict(process)), namespace=_NAMESPACE)
    if silence_s:
        beat = (process.actor_id, silence_s / _HEARTBEATS)
        threading.Thread(target=_send_heartbeats, args=beat, name="slime-heartbeat", daemon=True).start()


def _nameless_file() -> IO[str]:
    """Found through /proc: nothing stays behind when the process is killed. To append to, as readers empty it."""
    descriptor, name = tempfile.mkstemp(prefix="slime-stack-")
    os.close(descriptor)
    file = open(name, "a", encoding="utf-8")  # noqa: SIM115 - stays open with the process
    os.unlink(name)
    return file


def process_of(actor_id: str | None) -> ProcessInfo | None:
    """None for actors that have not introduced themselves."""
    found = _internal_kv_get(actor_id, namespace=_NAMESPACE) if actor_id else None
    return None if found is None else ProcessInfo(**json.loads(found))


def processes_of(refs: Iterable[Any]) -> Iterator[ProcessInfo]:
    """The actors that work on ``refs``, each once."""
    for actor_id in dict.fromkeys(ref.task_id().actor_id().hex() for ref in refs):
        process = process_of(actor_id)
        if process is not None:
            yield process


def last_heartbeat(process: ProcessInfo) -> bytes | None:
    """What the process counted last; says nothing but whether it has counted since one last asked."""
    return _internal_kv_get(_heartbeat_key(process.actor_id), namespace=_NAMESPACE)


def myself() -> str:
    """Who waits."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    process = process_of(context.get_actor_id()) if context is not None else None
    return str(process) if process is not None else f"the driver (pid {os.getpid()})"


def _send_heartbeats(actor_id: str, every_s: float) -> None:
    for count in itertools.count():
        with contextlib.suppress(Exception):  # the store does not answer, in whatever way: nobody can feel a pulse then
            _internal_kv_put(_heartbeat_key(actor_id), str(count), namespace=_NAMESPACE)
        time.sleep(every_s)


def _heartbeat_key(actor_id: str) -> str:
    return f"{actor_id}.pulse"


def _host() -> str:
    return str(ray.util.get_node_ip_address())


# Finds processes that do not live any more although they have not ended, and ends them.
#
#     no beat for --heartbeat-timeout, and the kernel says that it is stopped         it is killed
#     no beat for six times as long, and it has hardly used a processor since         it is killed
#     no beat, but it works, waits for a disk, or is being debugged                   a warning, once
#
# Killing it makes it an ordinary death: its memory and its ports are free, its peers fail, and the run ends or begins
# again as after any other. A process that beats and waits, for a lock or in a collective, is left alone: its wait
# has a deadline of its own.
#
# Used by ``waiting``: only those that somebody waits for are looked at.

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 2.0
_STUCK = 6
"""Native code may keep the interpreter for itself for a while; six times the silence that is allowed is no while."""

_IDLE = 0.1
"""Share of a processor that Ray's own threads stay below."""

_REMOTE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Usage:
    """What the kernel says of a process: its state as psutil names it, and processor time used, in seconds."""

    state: str
    cpu_s: float


@dataclass
class _Silence:
    """What one process said last, for how long it has not said anything else, and how it was when that was noticed."""

    beat: bytes | None
    silent_s: float = 0.0
    noticed: Usage | None = None
    noticed_after_s: float = 0.0


class HeartbeatWatch:
    """The eye on those that one wait depends on.

    Time in which nobody looked does not count as silence: the one who waits may have been stopped as well.
    """

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._processes: dict[Any, list[ProcessInfo]] = {}
        self._silences: dict[str, _Silence] = {}

    def look(self, pending: Sequence[Any]) -> tuple[ProcessInfo, str] | None:
        """The first of those that work on ``pending`` that had to be killed, and why; None when all live."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_EVERY_S:
            return None
        passed, self._looked_at = min(now - self._looked_at, 2 * _LOOK_EVERY_S), now
        try:
            for process in self._watched(pending):
                reason = self._examine(process, passed)
                if reason is not None:
                    return process, reason
        except RayError as error:  # the store does not answer: nothing is known
            logger.warning("the processes' heartbeats cannot be read: %s", error)
        return None

    def _watched(self, pending: Sequence[Any]) -> list[ProcessInfo]:
        for ref in pending:
            if ref not in self._processes:
                self._processes[ref] = [process for process in processes_of([ref]) if process.silence_s]
        return list({process.actor_id: process for ref in pending for process in self._processes[ref]}.values())

    def _examine(self, process: ProcessInfo, passed: float) -> str | None:
        beat = last_heartbeat(process)
        silence = self._silences.get(process.actor_id)
        if beat is None or silence is None or silence.beat != beat:
            self._silences[process.actor_id] = _Silence(beat)
            return None
        silence.silent_s += passed
        if silence.silent_s < process.silence_s:
            return None
        usage = _on_node_of(process, _usage)
        if usage is None:
            return None
        if silence.noticed is None:
            silence.noticed, silence.noticed_after_s = usage, silence.silent_s
            logger.warning("%s has given no sign of life for %.0f s (%s)", process, silence.silent_s, usage.state)
        reason = _why_it_is_gone(silence, usage, process.silence_s)
        if reason is None:
            return None
        _on_node_of(process, _kill)
        return f"{reason}: no sign of life for {silence.silent_s:.0f} s. It was killed."


def _why_it_is_gone(silence: _Silence, usage: Usage, silence_s: float) -> str | None:
    assert silence.noticed is not None
    match usage.state:
        case psutil.STATUS_STOPPED:
            return "it was stopped, as by SIGSTOP"
        case psutil.STATUS_SLEEPING:
            since = silence.silent_s - silence.noticed_after_s
            is_idle = usage.cpu_s - silence.noticed.cpu_s < _IDLE * since
            hangs = silence.silent_s >= _STUCK * silence_s and is_idle
            return "it hangs in native code, without using a processor" if hangs else None
        case _:
            return None  # it wants a processor or a disk and gets none, or somebody debugs it


def _usage(pid: int, created: float) -> Usage | None:
    try:
        process = psutil.Process(pid)
        if process.create_time() != created:
            return None
        times = process.cpu_times()
        return Usage(process.status(), times.user + times.system)
    except psutil.NoSuchProcess:
        return None


def _kill(pid: int, created: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == created:
            process.kill()


def _on_node_of(process: ProcessInfo, function: Callable[[int, float], T]) -> T | None:
    """``function(pid, created)``, called on the node of the process; None when that node does not answer either."""
    if process.node_id == ray.get_runtime_context().get_node_id():
        return function(process.pid, process.created)
    where = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    ref = ray.remote(function).options(num_cpus=0, scheduling_strategy=where).remote(process.pid, process.created)
    try:
        return cast("T", ray.get(ref, timeout=_REMOTE_TIMEOUT_S))
    except RayError as error:
        logger.warning("%s cannot be looked at: %s", process, error)
        return None
