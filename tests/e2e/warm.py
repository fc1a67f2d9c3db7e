"""Imports of ``slime.ray.engines.preloading``, done once for all runs of the tests: half of a short run's work.

    process of preloading of a run                     warm process: of trainers, of other workers, of engines
    ------------------------------                     -------------------------------------------------------
    gets the needs and sockets of the run  --------->  forks a process, which serves a socket of the run
    ends with its owner                    --------->  which then ends what was forked from it for the run

A run whose environment differs from that of the warm processes does its own imports. So does each run of a test that
kills drivers: processes that are forked here are not descendants of the driver, which its reaper would kill.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

from slime.ray.run.worker_launcher import _environment_of, differing

__all__ = ["COLD", "MARK", "Warm", "begin"]

ROOT = Path(__file__).resolve().parents[2]
MARK = "SLIME_TEST_RUN"
_WARM = "SLIME_TEST_WARM"
COLD = {_WARM: ""}
"""Variables of a run that does its own imports."""
_SERVES = "serves"
_TRAINER = "slime.backends.megatron_utils.actor"
_MAY_DIFFER = {MARK, _WARM, "PYTEST_CURRENT_TEST"}
_MESSAGE_BYTES = 1 << 20
_GRACE_S = 1.0  # as the reaper's


class Warm:
    """The warm processes of one process of pytest, which start with its first run.

    ``environment`` is that of all runs.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._imports: Any = None

    @cached_property
    def variables(self) -> dict[str, str]:
        """Those of a run that uses them."""
        from slime.ray.engines import preloading

        self._folder = tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp")  # a short path, as sockets need
        path = {"PYTHONPATH": f"{Path(__file__).with_name('site')}:{ROOT}", "PYTHONUNBUFFERED": "1"}
        with patch.dict(os.environ, self._environment, clear=True):
            self._imports = preloading._Imports(preloading.forks_env() | path | {_WARM: _SERVES, MARK: "0" * 32})
        listeners = [preloading.listen(f"{self._folder.name}/{kind}") for kind in ("worker", "trainer", "engine")]
        log = Path(self._folder.name) / "log"
        log.touch()
        needs = {"log": str(log), "trainer": _TRAINER, "has_engines": True}
        socket.send_fds(self._imports.needs, [json.dumps(needs).encode()], [one.fileno() for one in listeners])
        for one in listeners:
            one.close()
        return path | {_WARM: f"{self._imports.process.pid} {self._folder.name}"}

    def stop(self) -> None:
        if self._imports is not None:
            self._imports.stop()
            self._folder.cleanup()


def begin(warm: str) -> None:
    """Become the warm process, or the process of a run that passes its sockets to those of ``warm``."""
    if warm == _SERVES:
        from slime.ray.engines import preloading

        preloading.serve = _serve_runs  # type: ignore[assignment]
        return
    pid, folder = warm.split(maxsplit=1)
    if names := differing(_environment_of(pid), dict(os.environ)) - _MAY_DIFFER:
        print(f"this run does its own imports: {sorted(names)}", file=sys.stderr)
        return
    from slime.utils.process import watch_owner

    watch_owner()
    message, descriptors, *_ = socket.recv_fds(socket.socket(fileno=int(sys.orig_argv[-1])), _MESSAGE_BYTES, 3)
    if not message:
        os._exit(0)  # no run begins
    needs = json.loads(message)
    served = dict(zip(("worker", "trainer", "engine"), descriptors, strict=True))
    if needs["trainer"] is None:
        os.close(served.pop("trainer"))
    if not needs["has_engines"]:
        os.close(served.pop("engine"))
    connections = []
    for kind, descriptor in served.items():
        request = {"env": dict(os.environ), "directory": os.getcwd(), "log": needs["log"]}
        request["modules"] = [needs["trainer"]] if kind == "trainer" else []
        connection = socket.socket(socket.AF_UNIX)
        # another trainer has to do without the modules of that one
        connection.connect(f"{folder}/{'worker' if kind == 'trainer' and needs['trainer'] != _TRAINER else kind}")
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [descriptor])
        os.close(descriptor)
        connections.append(connection)
    select.select(connections, [], [])
    os._exit(1)  # a process that serves has ended


def _serve_runs(listener: socket.socket, become: Any) -> None:
    """Fork a process per run, which serves a socket of it, as ``serve`` does."""
    while True:
        connection, _ = listener.accept()
        data, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        while not data.endswith(b"\n"):
            data += connection.recv(_MESSAGE_BYTES)
        pid = os.fork()
        if pid == 0:
            listener.close()
            _serve_run(socket.socket(fileno=descriptors[0]), connection, json.loads(data), become)
        connection.close()
        os.close(descriptors[0])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _serve_run(listener: socket.socket, connection: socket.socket, request: dict[str, Any], become: Any) -> None:
    from slime.backends.sglang_utils import fork_server
    from slime.backends.sglang_utils.server_args import server_env
    from slime.ray.engines import preloading

    try:
        os.setsid()
        _write_mark(request["env"][MARK])
        env = request["env"] | (server_env() if become is fork_server.become_server else {})
        for name in {*os.environ, *env}:
            if name not in env:
                del os.environ[name]
            elif os.environ.get(name) != env[name]:  # setproctitle finds the others at their first place only
                os.environ[name] = env[name]
        os.chdir(request["directory"])
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        fork_server.redirect_output(log, log)
        tempfile.tempdir = None  # it is cached
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        preloading._import(request["modules"])
        fork_server.serve(listener, become)
    finally:
        os._exit(1)


def _write_mark(mark: str) -> None:
    """Into the environment that /proc shows, which the processes that are forked from this one inherit."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(fields[47]), int(fields[48])
    position = ctypes.string_at(start, end - start).index(f"{MARK}=".encode()) + len(MARK) + 1
    ctypes.memmove(start + position, mark.encode(), len(mark))


def _end_with(connection: socket.socket) -> None:
    import psutil

    with suppress(OSError):
        while connection.recv(1):
            pass
    time.sleep(_GRACE_S)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os.killpg(0, signal.SIGKILL)
