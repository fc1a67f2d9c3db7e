"""Failure reports: the process that died or does not answer, its last lines, and the stacks of the others.

    trainer rank 1 died (pid 812 on 127.0.0.1) while the driver (pid 700) waited 2.1 s for the trainer to train ...:
    it ended without a trace, as after SIGKILL ...
      its last lines (/tmp/ray/.../worker-....err):
          ...
      trainer rank 0 (pid 811 on 127.0.0.1) is at:
          File "/.../slime/backends/megatron_utils/step.py", line 71 in run_step

Also the resources that a Ray cluster lacks for actors and placement groups that wait. The cluster may grow, so a
shortage is a reason to report and not to stop.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private.state import actors  # Ray has no public call for this without a dashboard
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayTaskError

from slime.observability.logging_utils import RUN_LOG
from slime.ray.watch.heartbeat import STACK_SIGNAL, ProcessInfo, myself, process_of, processes_of
from slime.utils.async_utils import Deadline
from slime.utils.errors import DeadlineExceeded, ProcessDied, SlimeError, reported
from slime.utils.process import log_tail, tail

_STACK_TIMEOUT_S = 1.0
_STACK_FRAMES = 3
_MOST_STACKS = 4
_LOG_LINES = 15
_LOG_BYTES = 256 * 1024  # read from the end of a log, which may have gigabytes


def death_report(error: RayActorError, pending: Sequence[Any], deadline: Deadline) -> ProcessDied:
    """The report on an actor that died during a call.

    Args:
        pending: refs of calls that other actors still work on.
    """
    process = process_of(error.actor_id)
    who = str(process) if process is not None else f"a process of the run (Ray actor {error.actor_id})"
    waited = f"{myself()} waited {deadline.elapsed:.1f} s for {deadline.what}"
    head = f"{who} died while {waited}: {_how_it_ended(error, process)}"
    return ProcessDied("\n".join([head, *_last_lines(process), *stacks_of(processes_of(pending))]))


def silence_report(process: ProcessInfo, reason: str, pending: Sequence[Any], deadline: Deadline) -> ProcessDied:
    """The report on an actor that was killed because it no longer lived."""
    waited = f"{myself()} waited {deadline.elapsed:.1f} s for {deadline.what}"
    others = [other for other in processes_of(pending) if other.actor_id != process.actor_id]
    head = f"{process} did not answer while {waited}: {reason}"
    return ProcessDied("\n".join([head, *_last_lines(process), *stacks_of(others)]))


def timeout_report(pending: Sequence[Any], num_refs: int, deadline: Deadline) -> DeadlineExceeded:
    """The report on actors that did not answer before the deadline."""
    processes = list(processes_of(pending))
    names = ", ".join(map(str, processes)) or "processes unknown"
    detail = f"{len(pending)} of {num_refs} calls have not returned: {names}"
    if missing := missing_for(pending):
        detail += f". {missing}"
    error = deadline.error(detail)
    lines = [line for process in processes[:1] for line in _last_lines(process)]
    return DeadlineExceeded("\n".join([f"{myself()} {error}", *stacks_of(processes), *lines]))


def stack_of(process: ProcessInfo) -> str | None:
    """Stacks of the threads that run slime's code, innermost frame first. None if the process does not answer.

    Contains all frames of slime and the innermost three of libraries. A thread in native code shows the Python line
    that called it.
    """
    if not process.is_here:
        return None
    try:
        os.truncate(process.stack, 0)  # an earlier stack must not be mistaken for the answer
        os.kill(process.pid, STACK_SIGNAL)
        text = _settled(Path(process.stack))
    except OSError:
        return None
    threads = [part for part in re.split(r"\n\n+", text.strip()) if part]
    ours = [thread for thread in threads if "/slime/" in thread] or threads[-1:]
    frames = [numbered for thread in ours for numbered in enumerate(thread.splitlines()[1:])]
    return "\n".join(frame.strip() for number, frame in frames if number < _STACK_FRAMES or "/slime/" in frame) or None


def _settled(path: Path) -> str:
    """The text of the file, once it has stopped growing."""
    end, before = time.monotonic() + _STACK_TIMEOUT_S, ""
    while time.monotonic() < end:
        time.sleep(0.05)
        text = path.read_text(encoding="utf-8", errors="replace")
        if text and text == before:  # equal twice: the handler writes the stacks thread by thread
            break
        before = text
    return before


def _how_it_ended(error: RayActorError, process: ProcessInfo | None) -> str:
    text = str(error)
    if error.actor_init_failed:
        return f"it could not start: {text.strip().splitlines()[-1].strip()}"
    if fatal := re.search(r"Fatal Python error: (.+)", _log(process)):
        return f"{fatal[1]} (its last frames are in the log)."
    if "ray.kill" in text:
        return "it was stopped by ray.kill."
    if "low on memory" in text or "OutOfMemory" in text:
        return "Ray killed it because the node ran low on memory."
    if "connection error code 2" in text:
        return (
            "it ended without a trace, as after SIGKILL: by hand, by the scheduler, or by the kernel when memory "
            "runs out (see dmesg); or code in it called os._exit."
        )
    return " ".join(text.split())


def _log(process: ProcessInfo | None) -> str:
    if process is None or not process.log:
        return ""
    try:
        return tail(Path(process.log), _LOG_BYTES)
    except OSError:
        return ""


def _last_lines(process: ProcessInfo | None) -> list[str]:
    if process is None or not _log(process).strip():
        return []
    # The logs of an embedded cluster are deleted with it. Those of a cluster stay on their nodes.
    return [f"  its last lines ({RUN_LOG.path or process.log}):", log_tail(Path(process.log), _LOG_LINES)]


def stacks_of(processes: Iterable[ProcessInfo]) -> list[str]:
    """The stacks of the first few processes, as lines. Processes that do not answer are skipped."""
    lines = []
    for process in list(processes)[:_MOST_STACKS]:
        stack = stack_of(process)
        if stack is not None:
            lines += [f"  {process} is at:", *("    " + line for line in stack.splitlines())]
    return lines


def message_of(error: BaseException) -> str | None:
    """The message for the user. None if ``error`` is a bug that needs its traceback.

    Ray wraps the error of an actor in its own type. Of errors that slime raises on purpose only the message is useful.
    """
    if isinstance(error, RayTaskError):
        return message_of(error.cause) if isinstance(error.cause, Exception) else None
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return (
            "Ray's object store is full, and so is the disk that it spills to: a rollout's batch has no place. Free "
            f"space in Ray's temporary directory, or make --rollout-batch-size or --async-buffer-size smaller ({error})"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full: {error}. Checkpoints that were complete still are; free space and start again."
    if isinstance(error, RayActorError):
        return f"a process of the run died: {error}"
    return str(error) if isinstance(error, SlimeError) else None


logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_GIB = 2**30
_WITHOUT_PROCESS = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")
_IN_BYTES = ("memory", "object_store_memory")


@dataclass
class Reports:
    """The times at which a wait is reported: within seconds, then every minute."""

    first_s: float = 5.0
    every_s: float = 60.0
    _started: float = field(default_factory=lambda: time.monotonic())
    _next_s: float | None = None

    def is_due(self) -> bool:
        elapsed = time.monotonic() - self._started
        due_s = self.first_s if self._next_s is None else self._next_s
        if elapsed < due_s:
            return False
        self._next_s = elapsed + self.every_s
        return True


@dataclass(frozen=True)
class Shortage:
    """Amounts by the name of the resource. Memory in bytes.

    Attributes:
        asked: the sum of all waiting requests.
        total: all of the cluster.
        free: the unused part of it.
    """

    asked: Mapping[str, float]
    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def missing(self) -> list[str]:
        """Names of the resources of which too little is free."""
        return [name for name, amount in self.asked.items() if amount > self.free.get(name, 0.0)]

    @property
    def is_final(self) -> bool:
        """Whether the idle cluster would be too small for the request."""
        return any(amount > self.total.get(name, 0.0) for name, amount in self.asked.items())

    def __str__(self) -> str:
        names = self.missing or list(self.asked)
        amounts = "; ".join(
            f"{name}: {_shown(name, self.asked[name])} asked for, {_shown(name, self.total.get(name, 0.0))} in the "
            f"cluster, {_shown(name, self.free.get(name, 0.0))} free"
            for name in sorted(names)
        )
        return amounts if self.missing else f"no node has enough of everything free ({amounts})"


def _shown(name: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if name in _IN_BYTES else f"{amount:g}"


def _or_none(ask: Callable[..., Answer]) -> Callable[..., Answer | None]:
    """Answer None if Ray does not answer: a report must not end the wait that it describes."""

    @functools.wraps(ask)
    def asked(*arguments: Any) -> Answer | None:
        # errors of Ray's own kinds, gRPC's and others
        with reported(lambda error: logger.debug("Ray does not say what waits for a place: %s", error)):
            return ask(*arguments)
        return None

    return asked


@_or_none
def shortage_of(bundles: Iterable[Mapping[str, float]] | None = None) -> Shortage | None:
    """The shortage for ``bundles``, by default for all waiting requests of the cluster. None if nothing waits."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    if bundles is None:
        demands = status.resource_demands
        waiting = [*demands.placement_group_demand, *demands.ray_task_actor_demand]
        counted = [(part.bundle, part.count) for demand in waiting for part in demand.bundles_by_count]
    else:
        counted = [(bundle, 1) for bundle in bundles]
    asked: Counter[str] = Counter()
    for bundle, count in counted:
        # without Ray's internal resources of placement groups, such as GPU_group_<id>
        asked.update({name: amount * count for name, amount in bundle.items() if "_group_" not in name})
    usage = {part.resource_name: part for part in status.cluster_resource_usage}
    total = {name: part.total for name, part in usage.items()}
    free = {name: part.total - part.used for name, part in usage.items()}
    return Shortage(asked, total, free) if asked else None


@_or_none
def unplaced_of(refs: Iterable[Any]) -> list[str]:
    """Classes and counts of the actors that work on ``refs`` and have no process yet: ``2 x TrainActor``."""
    found = [actors(actor_id) for actor_id in {ref.task_id().actor_id().hex() for ref in refs}]
    counts = Counter(actor["ActorClassName"] for actor in found if actor.get("State") in _WITHOUT_PROCESS)
    return [f"{count} x {name}" for name, count in sorted(counts.items())]


def missing_for(refs: Iterable[Any]) -> str | None:
    """A sentence on the resources that keep the actors of ``refs`` from starting. None if all have started."""
    unplaced = unplaced_of(refs)
    missing = shortage_of() if unplaced else None
    return None if not unplaced or missing is None else f"Ray has no place for {', '.join(unplaced)}: {missing}"
