"""A process that imports the libraries of a run once. On a CPU the processes of the run are forked from it.

    imports torch          ->  forks a process that imports the trainer  ->  trainer ranks are forked from it
    imports transformers   ->  forks a process                           ->  the other workers of Ray
    imports SGLang                                                       ->  engines

In an embedded cluster it begins before flags are read (``run.main``), and later gets the needs of the run. It must not
import Ray, which reads the variables of a worker at its import. ``run.worker_launcher`` compares the other ones. In an
existing cluster the rollout manager starts a process on its own node that imports SGLang alone (``servers``).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

# Other modules of slime are imported later: the imports in the background must begin at once.
from slime.backends.sglang_utils.fork_server import (
    ForkServer,
    become_server,
    forget_allocator_settings,
    fork_child,
    is_running,
    listen,
    preload_sglang,
    redirect_output,
    serve,
)
from slime.config.parse import asked_help
from slime.ray.run.worker_launcher import WORKER_FORKS, differing
from slime.utils import accelerator
from slime.utils.accelerator import allow_torchvision_on_cpu
from slime.utils.errors import EngineError
from slime.utils.net import WEIGHT_INTERFACES, WEIGHT_LOOPBACK
from slime.utils.process import GUARD_FD_VARIABLE, GuardedProcess, log_tail, watch_owner

FORK_SERVER_LOG = "fork_server.log"
FORK_SERVER = "SLIME_FORK_SERVER"
"""Environment variable of all processes of a run: pid and socket of the fork server of its cluster, if any."""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Defaults of SGLang's processes. Trainer and engines form one NCCL group, whose members must agree on both.
NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
_INHERITED = ("SLIME_ACCELERATOR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_HUB_OFFLINE")
# Inherited in an embedded cluster only: on several nodes the values differ.
_ONE_NODE = ("SLIME_HOST_IP", FORK_SERVER)

# Among them are modules that Ray imports, except pyarrow, which starts a thread.
_ALL: tuple[str, ...] = ("torch", "torch._dynamo", "transformers")
_ALL += ("pydantic.v1", "requests", "google.protobuf.json_format", "jsonschema")
_TRAINER = ("slime.weight_sync",)
_WORKER: tuple[str, ...] = (
    "transformers.models.auto.tokenization_auto",
    "slime.rollout.sglang_rollout",
    "slime.rollout.data_source",
)
_WORKER += ("slime.batch.ship", "slime.backends.sglang_utils.engine", "slime.backends.sglang_utils.router")
_WORKER += ("slime.backends.training.rules", "slime.config.plan.engine", "slime.observability.console")
# Of mallopt() in glibc's malloc.h, and the variables that set them at the start of a process.
_MALLOC = {-1: "MALLOC_TRIM_THRESHOLD_", -3: "MALLOC_MMAP_THRESHOLD_"}


class _Imports:
    """The process, which imports the modules of all runs, and then those that the needs of this run add."""

    def __init__(self, env: Mapping[str, str]) -> None:
        # The folder of this slime comes first. The working directory, in which Python would look, may have another one.
        root = str(Path(__file__).resolve().parents[3])
        path = f"import sys; sys.path[: not sys.flags.safe_path] = [{root!r}]"
        code = f"{path}; from slime.ray.engines import preloading; preloading.main()"
        self.env = {**os.environ, **env}
        self.needs, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            argv, fds = [sys.executable, "-c", code, str(theirs.fileno())], [theirs.fileno()]
            self.process = GuardedProcess(argv, log_path=Path(os.devnull), env=env, pass_fds=fds)

    def stop(self) -> None:
        self.needs.close()
        self.process.stop()


_begun: list[_Imports] = []


@contextmanager
def imports_begun(words: Sequence[str]) -> Iterator[None]:
    """Begin the imports before flags are read, if the command line ``words`` will start a cluster on a CPU."""
    is_run = not asked_help(words) and not os.environ.get("RAY_ADDRESS") and "ray" not in sys.modules
    # Not with another accelerator: an unsupported one would raise.
    if is_run and os.environ.get("SLIME_ACCELERATOR", "cpu") in ("", "cpu") and accelerator.current().is_cpu:
        _begun.append(_Imports(forks_env()))
    try:
        yield
    finally:
        while _begun:
            _begun.pop().stop()


@contextmanager
def preloading(log: Path, env: Mapping[str, str], *, trainer: str | None, has_engines: bool) -> Iterator[None]:
    """Import the modules of a run in the background. Inside the block its processes are forked from them.

    Args:
        log: file for the output of the process.
        env: variables of the run's processes, in addition to those of this process.
        trainer: module of the trainer, if the run has one.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    with ExitStack() as started:
        folder = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="slime-fork-")))
        begun = _begun.pop() if _begun else _Imports(env)
        if begun.process.exit_code() is not None or differing(begun.env, {**os.environ, **env}):
            begun.stop()  # a function of the user has set a variable at its import
            begun = _Imports(env)
        started.callback(begun.stop)
        listeners = [listen(str(folder / name)) for name in ("worker", "trainer", "engine")]
        needs = {"log": str(log), "trainer": trainer, "has_engines": has_engines}
        with suppress(OSError):  # it has just ended: workers notice
            socket.send_fds(begun.needs, [json.dumps(needs).encode()], [one.fileno() for one in listeners])
        for one in listeners:
            one.close()
        found = {WORKER_FORKS: folder} | ({FORK_SERVER: folder / "engine"} if has_engines else {})
        os.environ.update({name: f"{begun.process.pid} {path}" for name, path in found.items()})
        try:
            yield
        finally:
            for name in found:
                del os.environ[name]


def forks_env() -> dict[str, str]:
    """Variables of the process: those of workers. No state of a GPU survives a fork."""
    return worker_variables(is_on_loopback=True) | dict.fromkeys(VISIBLE_DEVICES, "")


def worker_variables(is_on_loopback: bool) -> dict[str, str]:
    env = {"RAY_USE_UVLOOP": "0", "TOKENIZERS_PARALLELISM": "false"}
    if accelerator.current().is_cpu:
        # Ranks and engines share the cores: spinning OpenMP barriers of several processes slow each other down by
        # orders of magnitude.
        env["OMP_NUM_THREADS"] = "1"
        env |= {name: os.environ[name] for name in VISIBLE_DEVICES if name in os.environ}  # GPUs stay hidden
    else:
        env |= {name: os.environ.get(name, value) for name, value in NCCL.items()}
    if is_on_loopback:
        env |= {"SLIME_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        env[WEIGHT_INTERFACES] = WEIGHT_LOOPBACK
        env |= {name: os.environ[name] for name in _ONE_NODE if name in os.environ}
    return env | {name: os.environ[name] for name in _INHERITED if name in os.environ}


class ClusterForkServer:
    """The fork server of the cluster, for users that do not own it."""

    def __init__(self, pid: int, socket_path: str, log_path: Path) -> None:
        self._pid = pid
        self.socket_path = socket_path
        self._log_path = log_path

    def raise_if_dead(self) -> None:
        if not is_running(self._pid):
            raise EngineError(
                f"the process that preloads SGLang (pid {self._pid}) has ended. Its last lines:\n"
                + log_tail(self._log_path)
            )

    def stop(self) -> None:
        """Do nothing: it ends with the cluster."""


def fork_server_of(log: Path) -> ForkServer | ClusterForkServer:
    """The fork server of the cluster, or a new one."""
    from slime.backends.sglang_utils.server_args import server_env

    if FORK_SERVER not in os.environ:
        return ForkServer(log, server_env())
    pid, socket_path = os.environ[FORK_SERVER].split(maxsplit=1)
    return ClusterForkServer(int(pid), socket_path, log)


def engine_log_directory(args: Namespace) -> Path:
    """Folder for the logs of engines and routers."""
    from slime.observability.tracking import run_directory

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


def _serve_engines(listener: socket.socket) -> None:
    from slime.backends.sglang_utils.server_args import server_env

    os.environ.update(server_env())
    forget_allocator_settings()
    malloc = ctypes.CDLL(None)
    for parameter, variable in _MALLOC.items():
        if variable in os.environ and hasattr(malloc, "mallopt"):
            malloc.mallopt(parameter, int(os.environ[variable]))
    preload_sglang()
    serve(listener, become_server)


def main() -> None:
    guard = os.environ.get(GUARD_FD_VARIABLE, "")

    def serve_in_child(listener: socket.socket, modules: Sequence[str], *unused: socket.socket) -> None:
        for one in unused:
            one.close()  # if both processes held it, its clients would wait for a dead one
        os.environ[GUARD_FD_VARIABLE] = guard
        watch_owner()
        serve_workers(listener, modules)

    watch_owner()
    with socket.socket(fileno=int(sys.argv[1])) as told:
        try:
            allow_torchvision_on_cpu()
            _import(_ALL)
        finally:  # also an error of the imports belongs into the log
            message, descriptors, *_ = socket.recv_fds(told, 1 << 16, 3)
            if not message:
                sys.exit()  # no run begins
            needs = json.loads(message)
            log = os.open(needs["log"], os.O_WRONLY | os.O_APPEND)
            redirect_output(log, log)
            worker, trainer, engine = (socket.socket(fileno=number) for number in descriptors)
    if needs["trainer"] is not None:
        fork_child(lambda: serve_in_child(trainer, (*_TRAINER, needs["trainer"]), worker, engine))
    trainer.close()
    _import(_WORKER)
    if not needs["has_engines"]:
        serve_workers(worker, ())
    fork_child(lambda: serve_in_child(worker, (), engine))
    worker.close()
    _serve_engines(engine)
