"""Python programs in forks of a server that has imported the large packages: a new interpreter imports them again.

The server does nothing but import, and has one thread: a fork of a process that has computed lacks the threads of its
libraries, may wait for a lock that one of them held, or crash.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

__all__ = ["put_python_in", "run_program"]

ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "torch._dynamo", "ray", "transformers", "fastapi", "uvicorn", "httpx")

_CLIENT = """\
#!{python} -SI
import json, os, socket, sys
if sys.argv[1:3] == ["-m", "pytest"] or sys.argv[1:2] == ["-c"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as client:
    client.connect("{address}")
    socket.send_fds(client, [b" "], [0, 1, 2])
    with client.makefile("rw") as stream:
        print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]), file=stream, flush=True)
        stream.readline()
        status = int(stream.readline())
sys.exit(status if status >= 0 else 128 - status)
"""


def run_program(*words: object, cwd: str | Path = ROOT, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """The file ``words[0]``, or ``-m`` and a module, with the arguments behind it."""
    command = [str(word) for word in words]
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        open(os.devnull) as null,
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(_address())
        socket.send_fds(client, [b" "], [null.fileno(), out.fileno(), err.fileno()])
        with client.makefile("rw") as stream:
            request = [command, str(cwd), dict(os.environ if env is None else env)]
            print(json.dumps(request), file=stream, flush=True)
            pid = int(stream.readline())
            try:
                status = int(stream.readline())
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                raise
        out.seek(0)
        err.seek(0)
        return CompletedProcess(command, status, out.read(), err.read())


def put_python_in(folder: Path) -> None:
    """Write programs ``python`` and ``python3`` for a shell, which fork the server."""
    for name in ("python", "python3"):
        program = folder / name
        program.write_text(_CLIENT.format(python=sys.executable, address=_address()))
        program.chmod(0o755)


@cache
def _address() -> str:
    """The socket of the server of this process, which is started by the first call."""
    directory = tempfile.TemporaryDirectory(prefix="py-", dir="/tmp")  # a short path, as sockets need
    address = f"{directory.name}/socket"
    command = [sys.executable, "-P", __file__, address]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # numpy starts threads otherwise, and the server refuses to fork them
    server = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the server that forks programs did not start: {' '.join(command)}")

    @atexit.register
    def end() -> None:
        server.kill()
        server.wait()
        directory.cleanup()

    return address


def _serve(address: str) -> list[str]:
    """Fork for each request. Returns the words of the program, in the fork that runs it."""
    for package in _PACKAGES:
        importlib.import_module(package)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        sys.exit(f"the imports of {', '.join(_PACKAGES)} started {threads - 1} threads, which a fork would lack")
    parent = os.getppid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    listener.settimeout(5)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork is waited for here
    gc.freeze()
    print("ready", flush=True)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            break
        connection.close()
    else:
        sys.exit()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rw") as stream:
        words, cwd, env = json.loads(stream.readline())
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            print(pid, file=stream, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=stream, flush=True)
            os._exit(0)
    connection.close()
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    return words


def _run(words: list[str]) -> int:
    """Run the program as the main program of this process. Returns its exit status."""
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(words[0]).resolve().parent))
    status: Any = 0
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # it also ends those of executors, and joins all
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    os._exit(_run(_serve(sys.argv[1])))  # the usual end of an interpreter takes a second for all these packages
