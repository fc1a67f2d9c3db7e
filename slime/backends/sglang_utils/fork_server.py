"""SGLang imported once, then forked: a further engine costs about a second and shares the pages of its code.

    owner (rollout manager)      fork server                          engine actor
    -----------------------      -----------                          ------------
    starts it, guarded  ------>  imports SGLang, opens a socket
                                 accepts  <--------------------------  connects, sends argv, env, log path as JSON
                                 forks; the child keeps the connection
                                 answers the child's pid  ---------->
                                 child: serves; the connection closes ->  the child's process group is killed

Only on a CPU: CUDA does not survive a fork. Safe because SGLang forks its scheduler and detokenizer before it starts
any thread, and because OpenMP has one.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime.utils.deadline import Deadline, wait_until
from slime.utils.errors import EngineError
from slime.utils.process import GuardedProcess, log_tail, watch_descriptor, watch_owner
from slime.utils.torchvision_cpu import install as allow_torchvision_on_cpu

__all__ = ["ForkServer", "ForkedServer"]

_MESSAGE_BYTES = 1 << 20


class ForkServer:
    """Owner's side: the preloading process. Ends with this process."""

    def __init__(self, log_path: Path, env: Mapping[str, str]) -> None:
        self.socket_path = str(
            Path(tempfile.mkdtemp(prefix="slime-fork-")) / "socket"
        )  # 0700, short enough for AF_UNIX
        argv = [sys.executable, "-m", "slime.backends.sglang_utils.fork_server", "--socket", self.socket_path]
        self._process = GuardedProcess(argv, log_path=log_path, env=env)

    def raise_if_dead(self) -> None:
        if self._process.exit_code() is not None:
            raise EngineError(
                f"the process that preloads SGLang ended with status {self._process.exit_code()}. Its last lines:\n"
                + log_tail(self._process.log_path)
            )

    def stop(self) -> None:
        self._process.stop()


class ForkedServer:
    """Engine's side: one forked server. Closing it, or dying, kills the server's process group."""

    def __init__(
        self, socket_path: str, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, deadline: Deadline
    ) -> None:
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        wait_until(lambda: Path(socket_path).exists(), deadline)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(max(1.0, deadline.remaining))
        self._connection.connect(socket_path)
        request = {"argv": list(argv), "env": dict(env), "log": str(log_path)}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = int(json.loads(_read_line(self._connection))["pid"])

    def exit_code(self) -> int | None:
        """None while the server's main process runs; its status is the fork server's to collect, so -1 otherwise."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return -1
        return -1 if state == "Z" else None

    def stop(self) -> None:
        from slime.utils.process import kill_group

        kill_group(self.pid)
        self._connection.close()


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(_MESSAGE_BYTES)
        if not part or len(data) > _MESSAGE_BYTES:
            raise EngineError("the process that preloads SGLang closed the connection before it started the engine")
        data += part
    return data


def _preload() -> None:
    """Import everything a server needs, and keep the garbage collector from touching (and so copying) its pages."""
    allow_torchvision_on_cpu()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    gc.collect()
    gc.freeze()


def _serve(socket_path: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = socket_path + ".new"
    listener.bind(temporary)
    os.chmod(temporary, 0o600)
    listener.listen()
    os.rename(temporary, socket_path)  # clients see the name only when connecting works
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            request = json.loads(_read_line(connection))
            pid = os.fork()
            if pid == 0:
                listener.close()
                _become_server(connection, request)
            connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _become_server(connection: socket.socket, request: dict[str, Any]) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(request["env"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    try:
        _launch(connection, request["argv"])
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _launch(connection: socket.socket, argv: Sequence[str]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    watch_descriptor(connection.detach())
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]  # SGLang forces spawn
    try:
        launch_server(prepare_server_args(list(argv)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Preload SGLang and fork servers on request.")
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    watch_owner()
    _preload()
    _serve(options.socket)


if __name__ == "__main__":
    main()
