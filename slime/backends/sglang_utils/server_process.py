"""Start of the SGLang process of a node: forked from the host's preloading process, or from scratch.

A large engine starts for many minutes: it reads hundreds of gigabytes, compiles kernels and records graphs. So the wait
for it goes on while its processes work (:class:`StartProgress`), and its time limit is generous.

``python -m slime.backends.sglang_utils.server_process <server flags>`` runs one SGLang server that ends with its owner.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil

from slime.backends.sglang_utils.fork_server import ForkedServer, forget_allocator_settings
from slime.utils.accelerator import allow_torchvision_on_cpu
from slime.utils.async_utils import Deadline
from slime.utils.process import GuardedProcess, has_ended, watch_owner, work_of

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 600.0  # an engine whose processes do nothing for this long during their start has failed
_NOTICE_TIMEOUT_S = 0.9  # less than SGLang's first pause in a health request
_LOOK_EVERY_S = 5.0
_REPORT_EVERY_S = 60.0
# Less does not count as work: servers that wait for a lock or a peer poll, and read a few bytes.
_MIN_CPU_SHARE = 0.05
_MIN_READ_BYTES = 1 << 20
_PART_PREFIX = "sglang::"  # SGLang names its child processes "sglang::scheduler_TP0", "sglang::detokenizer", ...


@dataclass(frozen=True)
class ForkAddress:
    """Address of the process with SGLang preloaded. Only engines of the same node can use it."""

    host: str
    socket_path: str

    def socket_on(self, host: str) -> str | None:
        """Its socket, if ``host`` is its node. Otherwise None."""
        # Both conditions: different nodes may share a file system, and simulated nodes may share an address.
        return self.socket_path if self.host == host and Path(self.socket_path).parent.exists() else None


def is_shutting_down(client: httpx.Client) -> bool:
    """True if the server of ``client`` got SIGTERM: SGLang then ends as soon as it has no request."""
    # It answers 503 on both routes at once. An unhealthy server needs a second or more for the second answer.
    for route in ("/ready", "/health"):
        try:
            if client.get(route, timeout=_NOTICE_TIMEOUT_S).status_code != 503:
                return False
        except httpx.HTTPError:
            return False
    return True


@dataclass(frozen=True)
class Activity:
    """Work of a server's processes since their start, with that of their ended children."""

    log_bytes: int = 0
    cpu_s: float = 0.0
    read_bytes: int = 0

    def __add__(self, other: Activity) -> Activity:
        return Activity(self.log_bytes + other.log_bytes, self.cpu_s + other.cpu_s, self.read_bytes + other.read_bytes)

    def since(self, before: Activity) -> str:
        """The difference, as the end of a sentence."""
        return (
            f"its log grew by {(self.log_bytes - before.log_bytes) / 1e3:.1f} kB, and its processes used "
            f"{self.cpu_s - before.cpu_s:.1f} s of processor time and read "
            f"{(self.read_bytes - before.read_bytes) / 1e9:.3f} GB"
        )


def activity_of(pid: int, log_path: Path) -> Activity:
    """The work of the server ``pid`` so far."""
    cpu_s, read_bytes = 0.0, 0
    with contextlib.suppress(psutil.Error):  # the server has just ended
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used_s, read = work_of(process)
                cpu_s, read_bytes = cpu_s + used_s, read_bytes + read
    with contextlib.suppress(OSError):
        return Activity(log_path.stat().st_size, cpu_s, read_bytes)
    return Activity(0, cpu_s, read_bytes)


class NodeServer:
    """The server of an engine on one node. If this process is killed, the server and its children are killed too.

    Args:
        env: added to the environment of this process.
        fork_server_socket: of the preloading process on this host, or None to start SGLang from scratch.
    """

    process: ForkedServer | GuardedProcess | None = None
    """None before the start."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, fork_server_socket: str | None = None
    ) -> None:
        self._argv = argv
        self._env = env
        self._log_path = log_path
        self._fork_server_socket = fork_server_socket
        self._parts: dict[str, psutil.Process] = {}

    def start(self, deadline: Deadline) -> None:
        """Launch it. ``deadline``: of the wait for the preloading process."""
        env, log_path, socket_path = self._env, self._log_path, self._fork_server_socket
        if socket_path is not None:
            self.process = ForkedServer(socket_path, self._argv, env=env, log_path=log_path, deadline=deadline)
        else:
            command = [sys.executable, "-m", "slime.backends.sglang_utils.server_process", *self._argv]
            self.process = GuardedProcess(command, log_path=log_path, env=env)

    def exit_code(self) -> int | None:
        """None while it runs, or before its start."""
        return None if self.process is None else self.process.exit_code()

    def note_parts(self) -> None:
        """Remember its child processes (scheduler, detokenizer, ...), once the engine answers and all of them run."""
        # Their ends must be watched: the server survives the end of some. On a node without HTTP SGLang waits for them
        # one after the other, and would not notice the end of the second while the first one lives.
        if self.process is None:
            return
        with contextlib.suppress(psutil.Error):  # it has just ended
            children = psutil.Process(self.process.pid).children(recursive=True)
            named = [(child.name(), child) for child in children]
            self._parts = {f"{name} ({child.pid})": child for name, child in named if name.startswith(_PART_PREFIX)}

    def lost_part(self) -> str | None:
        """The name of a child process that has ended."""
        return next((name for name, part in self._parts.items() if has_ended(part)), None)

    def activity(self) -> Activity | None:
        """Its work so far. None before its start."""
        return None if self.process is None else activity_of(self.process.pid, self._log_path)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()


class OtherNode(Protocol):
    """The part of an engine on another node than its first."""

    def start(self) -> None:
        """Launch it without waiting for readiness: no part is ready before all parts are."""

    def note_parts(self) -> None:
        """From now on, count the part as lost when one of its server's processes ends. Does not wait."""

    def lost(self) -> str | None:
        """The reason of its end, as the second half of a sentence. None while it runs."""

    def activity(self) -> Activity | None:
        """The work of its server so far. None before its start."""

    def stage_adapter(self, tensors: bytes, metadata: Sequence[Any], num_ranks: int, timeout_s: float) -> list[str]:
        """Put an adapter into this node's memory. Returns what each of its ``num_ranks`` ranks reads."""

    def stop(self) -> None:
        """Kill it and everything it started. Never raises."""


class StartProgress:
    """Decides how long to wait for an engine that starts.

    Args:
        name: of the engine, for messages.
        limit_s: seconds after which a start that goes on fails as well (``--engine-start-timeout``).
    """

    def __init__(self, name: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._limit_s = limit_s
        self._clock = clock
        self._started = self._looked_at = self._worked_at = self._reported_at = clock()
        self._worked = self._reported = Activity()

    def failure(self, look: Callable[[], Sequence[Activity | None]]) -> str | None:
        """The reason to give the engine up, or None. Warns every minute.

        Args:
            look: the work of the engine's parts so far, one per node. None: a part that has not started.
        """
        now = self._clock()
        if now - self._started >= self._limit_s:
            return f"{self._name} is not healthy after {self._limit_s:g} s (--engine-start-timeout)"
        if now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        parts = list(look())
        seen = sum((part for part in parts if part is not None), Activity())
        num_absent = parts.count(None)
        idle_s = now - self._worked_at
        # Without a part that does not run yet, the others can only wait.
        if num_absent or self._has_worked(seen, idle_s):
            self._worked, self._worked_at = seen, now
        elif idle_s >= STALL_TIMEOUT_S:
            return (
                f"{self._name} stopped working: for {idle_s:.0f} s {seen.since(self._worked)}. This is "
                f"{now - self._started:.0f} s after its start. While it works it has {self._limit_s:g} s "
                "(--engine-start-timeout)"
            )
        if now - self._reported_at >= _REPORT_EVERY_S:
            absent = f" {num_absent} of its {len(parts)} nodes have not started." if num_absent else ""
            logger.warning(
                "%s has been starting for %.0f s: in the last %.0f s %s.%s It has until %g s (--engine-start-timeout).",
                *(self._name, now - self._started, now - self._reported_at, seen.since(self._reported), absent),
                self._limit_s,
            )
            self._reported, self._reported_at = seen, now
        return None

    def _has_worked(self, seen: Activity, seconds: float) -> bool:
        before = self._worked
        return (
            seen.log_bytes > before.log_bytes
            or seen.cpu_s - before.cpu_s > _MIN_CPU_SHARE * seconds
            or seen.read_bytes - before.read_bytes > _MIN_READ_BYTES
        )


def main() -> None:
    watch_owner()
    forget_allocator_settings()
    allow_torchvision_on_cpu()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    launch_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
