"""A process that imports SGLang once and forks servers: an engine starts in about a second and shares code pages.

    owner (rollout manager)      fork server                          engine actor
    -----------------------      -----------                          ------------
    opens a socket, starts
    it, guarded  ------------->  imports SGLang
                                 accepts  <--------------------------  connects, sends argv, env, log path as JSON
                                 forks; the child keeps the connection
                                 answers the child's pid  ---------->
                                 answers its exit status when it ends  ->
                                 child: serves; the connection closes ->  the child's process group is killed

Only for CPU engines, because CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

from slime.utils.accelerator import allow_torchvision_on_cpu
from slime.utils.async_utils import Deadline
from slime.utils.errors import EngineError
from slime.utils.process import GuardedProcess, kill_group, log_tail, watch_descriptor, watch_owner

_MESSAGE_BYTES = 1 << 20
_REQUEST_TIMEOUT_S = 5.0  # a client that connects and sends nothing is disconnected after this time
_REAP_EVERY_S = 0.2
# SGLang's dumper imports megatron-core, and with it wandb. Losses of transformers import scipy. No engine uses them.
_NOT_OF_ENGINES = ("megatron", "scipy")
_OF_ENGINES: tuple[str, ...] = ("sglang.srt.entrypoints.http_server", "sglang.srt.model_executor.model_runner")
_OF_ENGINES += ("slime.backends.sglang_utils.cpu_platform.models.supported",)
_Become = Callable[[socket.socket, Mapping[str, Any]], None]
_Sockets = Sequence[socket.socket]


class ForkServer:
    """Owner's side: the preloading process. Ends with this process."""

    def __init__(self, log_path: Path, env: Mapping[str, str]) -> None:
        # mkdtemp: only this user can connect (0700), and AF_UNIX needs a short path (108 bytes)
        self.socket_path = str(Path(tempfile.mkdtemp(prefix="slime-fork-")) / "socket")
        with listen(self.socket_path) as listener:
            argv, fds = [sys.executable, "-m", __name__, str(listener.fileno())], [listener.fileno()]
            self._process = GuardedProcess(argv, log_path=log_path, env=env, pass_fds=fds)

    def raise_if_dead(self) -> None:
        if self._process.exit_code() is not None:
            raise EngineError(
                f"the process that preloads SGLang ended with status {self._process.exit_code()}. Its last lines:\n"
                + log_tail(self._process.log_path)
            )

    def stop(self) -> None:
        self._process.stop()
        remove_socket(self.socket_path)


class ForkedServer:
    """Engine's side: one forked server. Its process group is killed when this object or this process ends."""

    def __init__(
        self, socket_path: str, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, deadline: Deadline
    ) -> None:
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(max(1.0, deadline.remaining))
        self._answers = self._connection.makefile("rb")
        self._lock = threading.Lock()
        self._exit_code: int | None = None
        self._is_stopped = False
        request = {"argv": list(argv), "env": dict(env), "log": str(log_path)}
        try:
            self._connection.connect(socket_path)
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            self.pid = self._answer("pid")
        except TimeoutError as error:
            self._disconnect()
            raise deadline.error(f"no answer from the preloading process at {socket_path}") from error
        except OSError as error:
            self._disconnect()
            reached = f"cannot reach the process that preloads SGLang at {socket_path}"
            raise EngineError(f"{reached}: {error}; see fork_server.log") from error

    def exit_code(self) -> int | None:
        """None while the server's main process runs. -1 if it ended after the fork server, which knew its status."""
        with self._lock:
            if self._exit_code is None and not is_running(self.pid):
                self._exit_code = self._reported_status()
            return self._exit_code

    def _reported_status(self) -> int:
        try:
            self._connection.settimeout(10 * _REAP_EVERY_S)
            return self._answer("exit")
        except (OSError, EngineError):
            return -1

    def _answer(self, key: str) -> int:
        line = self._answers.readline(_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise EngineError(f"the process that preloads SGLang closed the connection before it told the {key}")
        return int(json.loads(line)[key])

    def stop(self) -> None:
        """Kill the server and all its children. Idempotent."""
        with self._lock:
            is_first, self._is_stopped = not self._is_stopped, True
        if is_first:  # not twice: later the pid may belong to another process
            kill_group(self.pid)
            self.exit_code()  # read the status before the connection closes
            self._disconnect()

    def _disconnect(self) -> None:
        # both: a socket stays open as long as the file made from it
        self._answers.close()
        self._connection.close()


def is_running(pid: int) -> bool:
    try:
        # after the last ")": the name of a process may contain spaces and parentheses
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie until the fork server reaps it


def remove_socket(socket_path: str) -> None:
    """Delete the socket of a fork server with its folder."""
    shutil.rmtree(Path(socket_path).parent, ignore_errors=True)


def preload_sglang() -> None:
    """Import everything that a server needs."""
    # Imports keep nearly everything. The collector would visit it again and again: a quarter of the time.
    gc.disable()
    allow_torchvision_on_cpu()
    compile_no_function()
    with _unavailable(_NOT_OF_ENGINES):
        from sglang.srt.plugins import load_plugins

        load_plugins()
        for name in _OF_ENGINES:
            importlib.import_module(name)
    # Frozen objects are not visited by the collector of a child, which would write to their pages and so copy them.
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def _unavailable(names: Sequence[str]) -> Iterator[None]:
    """Imports of these packages fail inside the block, unless they have been imported."""
    from transformers.utils import is_scipy_available

    hidden = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]
    is_scipy_available.cache_clear()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        is_scipy_available.cache_clear()


def compile_no_function() -> None:
    """Make ``torch.compile`` leave functions as they are, as ``server_env()`` does in processes that are not forked."""
    import torch

    compile_module = torch.compile

    def leave_functions(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(leave_functions, **options)
        return model if isinstance(model, FunctionType) else compile_module(model, **options)

    torch.compile = leave_functions  # type: ignore[assignment]


def listen(socket_path: str) -> socket.socket:
    """A socket to which clients of this user can connect at once, and which a dead process closes.

    So it is opened before the process starts that will serve it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_path)
    os.chmod(socket_path, 0o600)  # a client can run code as this user
    listener.listen()
    return listener


def serve(listener: socket.socket, become: _Become) -> NoReturn:
    """Fork a child per request, which runs ``become`` with the connection and the request."""
    print("ready", flush=True)
    asking: dict[socket.socket, _Asking] = {}
    servers: dict[int, socket.socket] = {}
    while True:
        _report_ended(servers)
        readable = select.select([listener, *asking], [], [], _REAP_EVERY_S)[0]
        if listener in readable:
            connection, _ = listener.accept()
            asking[connection] = _Asking(time.monotonic() + _REQUEST_TIMEOUT_S)
        for connection in list(asking):
            try:
                request = asking[connection].request(connection, is_readable=connection in readable)
            except (OSError, EngineError, ValueError, KeyError, TypeError) as error:
                print(f"ignored a client: {type(error).__name__}: {error}", flush=True)
                del asking[connection]
                connection.close()
                continue
            if request is not None:
                del asking[connection]
                # The child must not hold other connections: their ends could not be detected.
                unused = [listener, *asking, *servers.values()]
                pid = fork_child(partial(_be_forked, become, connection, request, unused))
                with contextlib.suppress(OSError):  # the child does it too: the first call counts
                    os.setpgid(pid, pid)  # so that the client can kill the group once it has the pid
                servers[pid] = connection
                _tell(connection, {"pid": pid})


@dataclass
class _Asking:
    """A client whose request is not complete. Read without blocking, so that other clients are served meanwhile."""

    patience: float
    data: bytes = b""

    def request(self, connection: socket.socket, *, is_readable: bool) -> dict[str, Any] | None:
        """The request once it is complete. Raises if the client disconnected, timed out, or sent an invalid request."""
        if is_readable:
            part = connection.recv(_MESSAGE_BYTES)
            self.data += part
            if not part or len(self.data) > _MESSAGE_BYTES:
                raise EngineError(f"it closed the connection after {len(self.data)} bytes")
        if self.data.endswith(b"\n"):
            request: dict[str, Any] = json.loads(self.data)
            return request | {"argv": list(request["argv"]), "env": dict(request["env"]), "log": str(request["log"])}
        if time.monotonic() > self.patience:
            raise TimeoutError(f"no request within {_REQUEST_TIMEOUT_S:g} s")
        return None


def _report_ended(servers: dict[int, socket.socket]) -> None:
    for pid in list(servers):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            connection = servers.pop(pid)
            _tell(connection, {"exit": os.waitstatus_to_exitcode(status)})
            connection.close()


def _tell(connection: socket.socket, message: dict[str, int]) -> None:
    """Send a message. If the client is gone, its server notices the closed connection and ends."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def fork_child(run: Callable[[], None]) -> int:
    """Fork a child that calls ``run`` and then ends. Returns its pid."""
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        run()
        status = 0
    except SystemExit as error:  # the log has the reason already: no traceback after it
        status = error.code if isinstance(error.code, int) else 1
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(status)  # even while an error propagates: it must not reach the accept loop


def _be_forked(become: _Become, connection: socket.socket, request: Mapping[str, Any], unused: _Sockets) -> None:
    os.setpgid(0, 0)  # before the first process is started: the group is killed as a whole
    for inherited in unused:
        inherited.close()
    become(connection, request)


def become_server(connection: socket.socket, request: Mapping[str, Any]) -> None:
    """Run the server of an engine in a forked child."""
    os.environ.update(request["env"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    redirect_output(log, log)
    _launch(connection, request["argv"])


def redirect_output(log: int, errors: int) -> None:
    """Use these descriptors for the output of this process, which has no input."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (errors, 2)):
        os.dup2(source, target)


def _launch(connection: socket.socket, argv: Sequence[str]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    watch_descriptor(connection.detach())  # detach: the descriptor must stay open when the socket object is collected
    # fork is safe: SGLang forks its scheduler and detokenizer before it starts a thread, OpenMP has one thread, and the
    # thread of the watch only waits in read().
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]  # SGLang forces spawn
    try:
        launch_server(prepare_server_args(list(argv)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def forget_allocator_settings() -> None:
    """Unset the CUDA allocator settings of the trainer."""
    # SGLang's memory saver does not work with expandable segments.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    watch_owner(before_end=lambda: remove_socket(listener.getsockname()))
    forget_allocator_settings()
    preload_sglang()
    serve(listener, become_server)


if __name__ == "__main__":
    main()
