"""Process info and heartbeats of a run's processes, and the end of processes that no longer live.

Every actor registers when it starts: name, pid, node, log, and a file for the Python stacks that it writes on SIGUSR2.
The info is in Ray's internal store and stays readable after the actor's death. A thread of the actor sends heartbeats
to the same store, with the work of the process so far. They stop if the process is stopped or native code holds the
interpreter.

    no heartbeat for --heartbeat-timeout, and the kernel reports the process as stopped       it is killed
    no heartbeat for six times as long, and it has hardly used a processor since              it is killed
    no heartbeat, but it works, waits for a disk, or is being debugged                        one warning

A killed process is an ordinary death: its memory and ports are free, its peers fail, and the run ends or restarts. A
process with heartbeats is never killed, also if it waits for a lock or in a collective: that wait has a deadline.
Only processes that a wait depends on are checked.
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

from slime.utils.process import work_of

logger = logging.getLogger(__name__)

SILENCE_S = 10.0  # default of --heartbeat-timeout

STACK_SIGNAL = signal.SIGUSR2
_NAMESPACE = "slime.processes"
_HEARTBEATS = 5  # heartbeats per silence_s
_LOOK_EVERY_S = 2.0
_STUCK = 6  # native code may hold the interpreter for a while, but not for six times the allowed silence
_IDLE = 0.1  # share of a processor that Ray's own threads do not exceed
_REMOTE_TIMEOUT_S = 10.0
# A process that does less between two reports of a start is called idle. Heartbeats use less.
_LITTLE_WORK = (1.0, 1 << 20)  # seconds of processor time, bytes read
_MOST_NAMED = 8

T = TypeVar("T")

_stack_file: list[IO[str]] = []  # stays open: the signal handler writes to it


@dataclass(frozen=True)
class ProcessInfo:
    """How to find a process of the run.

    Attributes:
        name: used in messages.
        pid: valid on the node ``host``.
        created: start of the process in seconds since 1970. A later process may have the same pid.
        log: file of its standard error. Empty if that is not a file.
        stack: file for its Python stacks, written on SIGUSR2.
        actor_id: hexadecimal, from Ray.
        node_id: hexadecimal, from Ray.
        silence_s: longest time between two heartbeats of a healthy process. 0 if it sends none.
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
        """Whether the process lives on this node."""
        try:
            return self.host == _host() and psutil.Process(self.pid).create_time() == self.created
        except psutil.NoSuchProcess:
            return False


def register_process(name: str, silence_s: float = SILENCE_S) -> None:
    """Publish the info of this actor's process and start its heartbeats. Called in the actor's constructor."""
    if not ray.is_initialized():
        return  # a test uses the body of an actor without Ray
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
    """A file without a name, found through /proc, so nothing remains if the process is killed."""
    descriptor, name = tempfile.mkstemp(prefix="slime-stack-")
    os.close(descriptor)
    # Appends, because readers empty the file before each request.
    file = open(name, "a", encoding="utf-8")  # noqa: SIM115 - stays open with the process
    os.unlink(name)
    return file


def process_of(actor_id: str | None) -> ProcessInfo | None:
    """The info of an actor. None if it has not registered."""
    found = _internal_kv_get(actor_id, namespace=_NAMESPACE) if actor_id else None
    return None if found is None else ProcessInfo(**json.loads(found))


def processes_of(refs: Iterable[Any]) -> Iterator[ProcessInfo]:
    """The registered actors that work on ``refs``, each once."""
    for actor_id in dict.fromkeys(ref.task_id().actor_id().hex() for ref in refs):
        process = process_of(actor_id)
        if process is not None:
            yield process


def last_heartbeat(process: ProcessInfo) -> bytes | None:
    """The counter of the last heartbeat. Two equal answers mean no heartbeat in between."""
    return cast("bytes | None", _internal_kv_get(_heartbeat_key(process.actor_id), namespace=_NAMESPACE))


def myself() -> str:
    """This process, for messages."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    process = process_of(context.get_actor_id()) if context is not None else None
    return str(process) if process is not None else f"the driver (pid {os.getpid()})"


def _send_heartbeats(actor_id: str, every_s: float) -> None:
    for count in itertools.count():
        with contextlib.suppress(Exception):  # the store may fail in any way, and the next heartbeat may arrive
            cpu_s, read_bytes = work_of(psutil.Process())
            _internal_kv_put(_heartbeat_key(actor_id), f"{count} {cpu_s:.2f} {read_bytes}", namespace=_NAMESPACE)
        time.sleep(every_s)


class WorkReport:
    """The work of the processes that a wait depends on, between two calls of :meth:`text`."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    def text(self, processes: Iterable[ProcessInfo]) -> str:
        """One line about the work since the last call, or since the starts of the processes. Names idle ones."""
        cpu_s, read_bytes, idle, count = 0.0, 0, [], 0
        for process in processes:
            count += 1
            words = (last_heartbeat(process) or b"").decode().split()
            now = (float(words[1]), int(words[2])) if len(words) == 3 else (0.0, 0)
            before = self._before.get(process.actor_id, (0.0, 0))
            self._before[process.actor_id] = now
            used_s, read = now[0] - before[0], now[1] - before[1]
            cpu_s, read_bytes = cpu_s + used_s, read_bytes + read
            if used_s < _LITTLE_WORK[0] and read < _LITTLE_WORK[1]:
                idle.append(str(process))
        named = ", ".join(idle[:_MOST_NAMED]) + (f" and {len(idle) - _MOST_NAMED} more" if idle[_MOST_NAMED:] else "")
        rest = f", idle: {named}" if idle else ""
        return f"{count} processes used {cpu_s:.1f} s of processor time and read {read_bytes / 1e9:.3f} GB{rest}"


def _heartbeat_key(actor_id: str) -> str:
    return f"{actor_id}.heartbeat"


def _host() -> str:
    return str(ray.util.get_node_ip_address())


@dataclass(frozen=True)
class Usage:
    """State of a process as psutil names it, and its processor time in seconds."""

    state: str
    cpu_s: float


@dataclass
class _Silence:
    """Silence of one process: its last heartbeat, seconds since then, and its usage when it was noticed."""

    beat: bytes | None
    silent_s: float = 0.0
    noticed: Usage | None = None
    noticed_after_s: float = 0.0


class HeartbeatWatch:
    """Checks the processes that one wait depends on."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._processes: dict[Any, list[ProcessInfo]] = {}
        self._silences: dict[str, _Silence] = {}

    def look(self, pending: Sequence[Any]) -> tuple[ProcessInfo, str] | None:
        """The first process that works on ``pending`` and had to be killed, with the reason. None if all live."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_EVERY_S:
            return None
        # This process may have been stopped as well: time without a look does not count as silence of others.
        passed, self._looked_at = min(now - self._looked_at, 2 * _LOOK_EVERY_S), now
        try:
            for process in self._watched(pending):
                reason = self._examine(process, passed)
                if reason is not None:
                    return process, reason
        except RayError as error:  # without an answer of the store nothing is known
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
        if usage is None:  # it has ended, which Ray reports, or its node does not answer
            return None
        if silence.noticed is None:
            silence.noticed, silence.noticed_after_s = usage, silence.silent_s
            text = "%s has given no sign of life for %.0f s (%s): killed if it is stopped, or after %.0f s if it hangs"
            logger.warning(text, process, silence.silent_s, usage.state, _STUCK * process.silence_s)
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
            return None  # it waits for a processor or a disk, or is being debugged


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
        if process.create_time() == created:  # another process may have the pid by now
            process.kill()


def _on_node_of(process: ProcessInfo, function: Callable[[int, float], T]) -> T | None:
    """``function(pid, created)``, called on the node of the process. None if that node does not answer."""
    if process.node_id == ray.get_runtime_context().get_node_id():
        return function(process.pid, process.created)
    where = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    ref = ray.remote(function).options(num_cpus=0, scheduling_strategy=where).remote(process.pid, process.created)
    try:
        return cast("T", ray.get(ref, timeout=_REMOTE_TIMEOUT_S))
    except RayError as error:
        logger.warning("%s cannot be looked at: %s", process, error)
        return None
