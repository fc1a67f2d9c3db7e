"""A process that imports the libraries of a run once. On a CPU the processes of the run are forked from it.

    imports torch          ->  forks a process that imports the trainer  ->  trainer ranks are forked from it
    imports transformers   ->  forks a process                           ->  the other workers of Ray
    imports SGLang                                                       ->  engines

In an embedded cluster it begins before Ray (``run.cluster``). It must not import Ray, which reads the variables of a
worker at its import. ``run.worker_launcher`` compares the other ones. In an existing cluster the rollout manager starts
a process on its own node that imports SGLang alone (``servers``).
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import importlib
import os
import resource
import runpy
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from slime.backends.sglang_utils.fork_server import (
    ForkServer,
    become_server,
    forget_allocator_settings,
    fork_child,
    listen,
    preload_sglang,
    redirect_output,
    remove_socket,
    serve,
)
from slime.backends.sglang_utils.server_args import server_env
from slime.observability.tracking import run_directory
from slime.ray.run.worker_launcher import WORKER_FORKS
from slime.utils.errors import EngineError
from slime.utils.process import GUARD_FD_VARIABLE, has_ended, log_tail, watch_owner
from slime.utils.torchvision_cpu import install as allow_torchvision_on_cpu

FORK_SERVER = "SLIME_FORK_SERVER"
"""Environment variable of all processes of a run: pid and socket of the fork server of its cluster, if any."""


# Among them are modules that Ray imports, except pyarrow, which starts a thread.
_ALL: tuple[str, ...] = ("torch", "torch._dynamo", "transformers")
_ALL += ("pydantic.v1", "requests", "google.protobuf.json_format", "jsonschema")
_TRAINER = ("slime.weight_sync.transports",)
_WORKER: tuple[str, ...] = (
    "transformers.models.auto.tokenization_auto",
    "slime.rollout.sglang_rollout",
    "slime.rollout.data_source",
)
_WORKER += ("slime.batch.compile", "slime.backends.sglang_utils.engine", "slime.backends.sglang_utils.router")
# Of mallopt() in glibc's malloc.h, and the variables that set them at the start of a process.
_MALLOC = {-1: "MALLOC_TRIM_THRESHOLD_", -3: "MALLOC_MMAP_THRESHOLD_"}


@contextmanager
def preloading(log: Path, env: Mapping[str, str], *, trainer: str | None, has_engines: bool) -> Iterator[None]:
    """Import the modules of a run in the background. Inside the block its processes are forked from them.

    Args:
        log: file for the output of the process.
        env: variables of the run's processes, in addition to those of this process.
        trainer: module of the trainer, if the run has one.
    """
    # The folder of this slime comes first. The working directory, in which Python would look, may have another one.
    root = str(Path(__file__).resolve().parents[3])
    path = f"import sys; sys.path[: not sys.flags.safe_path] = [{root!r}]"
    code = f"{path}; from slime.ray.engines import preloading; preloading.main()"
    words = [*(["--trainer-module", trainer] if trainer else []), *(["--engines"] if has_engines else [])]
    with ExitStack() as started:
        folder = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="slime-fork-")))
        # Here and not in the process: a launcher can connect at once, and a dead process ends its wait.
        listeners = {name: listen(str(folder / name)) for name in ("worker", "trainer")}
        words += [word for name, one in listeners.items() for word in (f"--{name}", str(one.fileno()))]
        fds = [one.fileno() for one in listeners.values()]
        server = ForkServer(log, env, [sys.executable, "-c", code, *words], fds)
        started.callback(server.stop)
        for one in listeners.values():
            one.close()
        found = {WORKER_FORKS: f"{server.pid} {folder}"}
        if has_engines:
            found[FORK_SERVER] = f"{server.pid} {server.socket_path}"
        os.environ.update(found)
        try:
            yield
        finally:
            for name in found:
                del os.environ[name]


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


def _import(modules: Sequence[str]) -> None:
    gc.disable()  # imports keep nearly everything
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # the collector of a child would write to the pages of frozen objects and so copy them
    gc.enable()


def serve_workers(listener: socket.socket, modules: Sequence[str]) -> None:
    """Import ``modules``, then fork a worker of Ray per request. Never returns."""
    _import(modules)
    threads = len(os.listdir("/proc/self/task"))
    if "ray" in sys.modules or threads > 2:  # this thread and the one of watch_owner, which only waits in read()
        raise RuntimeError(f"no worker is forked: Ray is imported ({'ray' in sys.modules}), or {threads} threads run")
    serve(listener, become_worker)


def become_worker(connection: socket.socket, request: Mapping[str, Any]) -> None:
    """Run Ray's ``default_worker.py`` in a forked child as in a new Python."""
    with connection:
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["directory"])
        redirect_output(*(os.open(request[name], os.O_WRONLY | os.O_APPEND) for name in ("log", "errors")))
        resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
        os.nice(request["niceness"] - os.nice(0))
        Path("/proc/self/oom_score_adj").write_text(request["oom_score"], encoding="ascii")
    tempfile.tempdir = None  # it is cached
    # As in a new process, which has another seed than any other one. The module random does so itself.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked child ends without them


def _serve_engines(socket_path: str) -> None:
    os.environ.update(server_env())
    forget_allocator_settings()
    malloc = ctypes.CDLL(None)
    for parameter, variable in _MALLOC.items():
        if variable in os.environ and hasattr(malloc, "mallopt"):
            malloc.mallopt(parameter, int(os.environ[variable]))
    preload_sglang()
    serve(listen(socket_path), become_server)


def main() -> None:
    parser = argparse.ArgumentParser(description="Import the modules of a run and fork its processes on request.")
    parser.add_argument("--socket", required=True, help="path for the socket of the engines")
    parser.add_argument("--worker", type=int, required=True, help="descriptor to which launchers of workers connect")
    parser.add_argument("--trainer", type=int, required=True, help="the same for trainer ranks")
    parser.add_argument("--trainer-module", help="module of the trainer, if the run has one")
    parser.add_argument("--engines", action="store_true", help="the run has engines")
    options = parser.parse_args()
    trainer, worker = (socket.socket(fileno=number) for number in (options.trainer, options.worker))
    guard = os.environ.get(GUARD_FD_VARIABLE, "")

    def serve_in_child(listener: socket.socket, modules: Sequence[str], unused: socket.socket) -> None:
        unused.close()  # if both processes held it, launchers would wait for a dead one
        os.environ[GUARD_FD_VARIABLE] = guard
        watch_owner()
        serve_workers(listener, modules)

    watch_owner(before_end=lambda: remove_socket(options.socket))
    try:
        allow_torchvision_on_cpu()
        _import(_ALL)
        if options.trainer_module is not None:
            fork_child(lambda: serve_in_child(trainer, (*_TRAINER, options.trainer_module), worker))
        trainer.close()
        _import(_WORKER)
        if not options.engines:
            serve_workers(worker, ())
        fork_child(lambda: serve_in_child(worker, (), trainer))
        worker.close()
        _serve_engines(options.socket)
    finally:
        remove_socket(options.socket)
