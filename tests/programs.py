"""Python programs in forks of this process, which has most packages imported: a new interpreter imports them again.

A fork imports the files of the repository anew, and has its own working directory, environment and output, but it
shares the packages that are loaded already. It may hang on a lock that a thread of this process held: then a new
interpreter runs the program.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess, Popen

__all__ = ["forked_python", "run_program", "wait_and_fork"]

ROOT = Path(__file__).parents[1]

_CLIENT = """\
#!{python} -SI
import json, os, socket, sys
if sys.argv[1:3] == ["-m", "pytest"] or sys.argv[1:2] == ["-c"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as client:
    client.connect("{address}")
    socket.send_fds(client, [b" "], [0, 1, 2])
    client.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    client.shutdown(socket.SHUT_WR)
    status = client.recv(9)
if not status:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
sys.exit(int(status))
"""
_HANGS_S = 300


def run_program(*words: object, cwd: str | Path = ROOT, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """The file ``words[0]``, or ``-m`` and a module, with the arguments behind it."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as null:
        command = [str(word) for word in words]
        descriptors = (null.fileno(), out.fileno(), err.fileno())
        pid = os.fork()
        if pid == 0:
            os._exit(_become(command, cwd, dict(os.environ if env is None else env), descriptors))
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        if status == -signal.SIGALRM:
            again = [sys.executable, *command]
            return subprocess.run(again, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        out.seek(0)
        err.seek(0)
        return CompletedProcess(command, status, out.read(), err.read())


@contextmanager
def forked_python(folder: Path) -> Iterator[socket.socket]:
    """``python`` and ``python3`` in ``folder``, for a shell, while :func:`wait_and_fork` waits for that shell."""
    with tempfile.TemporaryDirectory(prefix="py-") as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/socket")
        listener.listen()
        listener.settimeout(0.02)
        for name in ("python", "python3"):
            program = folder / name
            program.write_text(_CLIENT.format(python=sys.executable, address=f"{directory}/socket"))
            program.chmod(0o755)
        yield listener


def wait_and_fork(listener: socket.socket, process: Popen[str]) -> None:
    """Serve the programs of ``process`` until it ends."""
    forks: list[int] = []
    while process.poll() is None:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(None)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as request:
                words, cwd, env = json.loads(request.read())
            pid = os.fork()
            if pid == 0:
                connection.sendall(b"%d" % _become(words, cwd, env, descriptors))
                os._exit(0)
            forks.append(pid)
            for descriptor in descriptors:
                os.close(descriptor)
    for pid in forks:
        os.waitpid(pid, 0)


def _become(words: Sequence[str], cwd: str | Path, env: Mapping[str, str], descriptors: Sequence[int]) -> int:
    """Run the program as the main program of this process, which is a fork. Returns its exit status."""
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_HANGS_S)
    atexit._clear()
    logging.root.handlers.clear()  # those of pytest
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the threads of OpenMP are not in a fork
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    ours = {name.partition(".")[0] for name, module in sys.modules.items() if not _is_installed(module)}
    ours.add("megatron")  # on a CPU it is rewritten while it is imported
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    try:
        _run(list(words))
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    signal.alarm(_HANGS_S)
    threading._shutdown()  # it also ends those of executors, and joins all
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _is_installed(module: object) -> bool:
    """False for files of this repository, of which some keep threads that a fork lacks, and for those of a test."""
    file = getattr(module, "__file__", None)
    return file is None or not os.path.isabs(file) or file.startswith((sys.prefix, sys.base_prefix))


def _run(words: list[str]) -> None:
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(words[0]).resolve().parent))
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
