"""How the SGLang process of a node is started: forked from the preloading process of its host, else from scratch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slime.backends.sglang_utils.fork_server import ForkedServer
from slime.utils.deadline import Deadline
from slime.utils.process import GuardedProcess

__all__ = ["ForkAddress", "launch_server", "named_children"]

_PART_PREFIX = "sglang::"
"""How the names of the processes begin that a server starts."""


@dataclass(frozen=True)
class ForkAddress:
    """Where the process that SGLang is preloaded in listens: only engines of the same node can use it."""

    host: str
    socket_path: str

    def socket_on(self, host: str) -> str | None:
        """Its socket, if this is its node: nodes with different addresses may share a file system, and nodes with the
        same one may not."""
        return self.socket_path if self.host == host and Path(self.socket_path).parent.exists() else None


def launch_server(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    fork_server_socket: str | None,
    deadline: Deadline,
) -> ForkedServer | GuardedProcess:
    """A server with these flags, tied to this process: if it is killed, so is the server, with all its children.

    Args:
        env: on top of this process's.
        fork_server_socket: of the preloading process on this host; None starts SGLang from scratch.
        deadline: for the preloading process to be there.
    """
    if fork_server_socket is not None:
        return ForkedServer(fork_server_socket, argv, env=env, log_path=log_path, deadline=deadline)
    command = [sys.executable, "-m", "slime.backends.sglang_utils.launch", *argv]
    return GuardedProcess(command, log_path=log_path, env=env)


def named_children(pid: int) -> dict[str, psutil.Process]:
    """Schedulers, detokenizers and the like of a server, by what to call them. Not all of them end it by their end."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        return {f"{name} ({child.pid})": child for child in children if (name := child.name()).startswith(_PART_PREFIX)}
    except psutil.Error:  # it ended this moment
        return {}
