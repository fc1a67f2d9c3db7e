"""Start of the SGLang process of a node: forked from the host's preloading process, or from scratch.

``python -m slime.backends.sglang_utils.server_process <server flags>`` runs one SGLang server that ends with its owner.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slime.backends.sglang_utils.fork_server import ForkedServer, forget_allocator_settings
from slime.utils.deadline import Deadline
from slime.utils.process import GuardedProcess, watch_owner
from slime.utils.torchvision_cpu import install as allow_torchvision_on_cpu

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


def launch_server(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    fork_server_socket: str | None,
    deadline: Deadline,
) -> ForkedServer | GuardedProcess:
    """Start a server with these flags. If this process is killed, the server and its children are killed too.

    Args:
        env: added to the environment of this process.
        fork_server_socket: of the preloading process on this host, or None to start SGLang from scratch.
        deadline: of the wait for the preloading process.
    """
    if fork_server_socket is not None:
        return ForkedServer(fork_server_socket, argv, env=env, log_path=log_path, deadline=deadline)
    command = [sys.executable, "-m", "slime.backends.sglang_utils.server_process", *argv]
    return GuardedProcess(command, log_path=log_path, env=env)


def named_children(pid: int) -> dict[str, psutil.Process]:
    """Child processes of a server (scheduler, detokenizer, ...) by name."""
    # Their ends must be watched: the server survives the end of some.
    try:
        children = psutil.Process(pid).children(recursive=True)
        return {f"{name} ({child.pid})": child for child in children if (name := child.name()).startswith(_PART_PREFIX)}
    except psutil.Error:  # it has just ended
        return {}


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
