"""A process that imports SGLang early, from which the engines of a CPU are forked.

The import is the longest part of the start of a run and does not need Ray. In an embedded cluster it begins before Ray
(``run.cluster``). In an existing cluster the rollout manager starts the process on its own node (``servers``).
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.server_args import server_env
from slime.observability.tracking import run_directory
from slime.utils.errors import EngineError
from slime.utils.process import has_ended, log_tail

FORK_SERVER = "SLIME_FORK_SERVER"
"""Environment variable of all processes of a run: pid and socket of the fork server of its cluster, if any."""


@contextmanager
def sglang_preloading(log: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Import SGLang in the background, ready to be forked inside the block.

    Args:
        log: file for the output of the process.
        env: variables of the run's processes, in addition to those of this process.
    """
    server = ForkServer(log, {**env, **server_env()})
    os.environ[FORK_SERVER] = f"{server.pid} {server.socket_path}"
    try:
        yield
    finally:
        del os.environ[FORK_SERVER]
        server.stop()


class ClusterForkServer:
    """The fork server of the cluster, for users that do not own it."""

    def __init__(self, pid: int, socket_path: str, log_path: Path) -> None:
        self._pid = pid
        self.socket_path = socket_path
        self._log_path = log_path

    def raise_if_dead(self) -> None:
        if _is_gone(self._pid):
            raise EngineError(
                f"the process that preloads SGLang (pid {self._pid}) has ended. Its last lines:\n"
                + log_tail(self._log_path)
            )

    def stop(self) -> None:
        """Do nothing: it ends with the cluster."""


def _is_gone(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def fork_server_of(log: Path) -> ForkServer | ClusterForkServer:
    """The fork server of the cluster, or a new one."""
    if FORK_SERVER not in os.environ:
        return ForkServer(log, server_env())
    pid, socket_path = os.environ[FORK_SERVER].split(maxsplit=1)
    return ClusterForkServer(int(pid), socket_path, log)


def fork_server_log(args: Namespace) -> Path:
    return engine_log_directory(args) / "fork_server.log"


def engine_log_directory(args: Namespace) -> Path:
    """Folder for the logs of engines and routers."""
    return run_directory(args, args.experiment_name) / "engines"
