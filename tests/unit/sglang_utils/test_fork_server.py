"""The preloading process against clients that misbehave. It preloads a fake SGLang, which starts at once."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils import fork_server
from slime.backends.sglang_utils.fork_server import ForkedServer, ForkServer
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import DeadlineExceeded, EngineError
from tests.limits import unloaded_time

RUNNER = """
try:
    import megatron.core
    has_megatron = True
except ImportError:
    has_megatron = False
"""
SERVER = """
import os, sys, time
RUNNER = "sglang.srt.model_executor.model_runner"
def launch_server(argv):
    match argv:
        case ["exit", status]:
            sys.exit(int(status))
        case ["environment"]:
            print({name for name in os.environ if "ALLOC_CONF" in name or name == "OURS"})
        case ["modules"]:
            print(RUNNER in sys.modules, sys.modules[RUNNER].has_megatron, "megatron" in sys.modules)
        case ["usage"]:
            print("usage: no such flag")
            sys.exit("bad flag")
        case ["raise"]:
            raise RuntimeError("the reason")
        case ["serve"]:
            time.sleep(600)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    return make_stand_in(tmp_path)


def make_stand_in(folder: Path) -> Path:
    """A package named sglang with as much of it as the process touches."""
    files = {
        **dict.fromkeys(("../__init__.py", "__init__.py", "entrypoints/__init__.py", "model_executor/__init__.py"), ""),
        "plugins/__init__.py": "load_plugins = lambda: None\n",
        "entrypoints/http_server.py": SERVER,
        "model_executor/model_runner.py": RUNNER,
        "server_args.py": "prepare_server_args = lambda argv: argv\n",
        "utils.py": "kill_process_tree = lambda pid, include_parent: None\n",
        "models/__init__.py": "",
        "models/minimax_m2.py": "class MiniMaxM2ForCausalLM: ...\n",
    }
    supported = Path(fork_server.__file__).with_name("cpu_platform") / "models" / "supported.py"
    for module, name in re.findall(r"from sglang\.srt\.models\.(\w+) import (\w+)", supported.read_text()):
        files[f"models/{module}.py"] = f"class {name}: ...\n"
    for name, text in files.items():
        path = folder / "sglang" / "srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    stand_in = make_stand_in(tmp_path_factory.mktemp("server"))
    running = ForkServer(stand_in / "log", {"PYTHONPATH": str(stand_in)})
    yield running
    running.stop()


def fork(server: ForkServer, log: Path, *argv: str) -> ForkedServer:
    return ForkedServer(server.socket_path, argv, env={}, log_path=log, deadline=Deadline(600, "the fork"))


def ended(forked: ForkedServer) -> int:
    wait_until(lambda: forked.exit_code() is not None, Deadline(600, "the server to end"))
    status = forked.exit_code()
    assert status is not None
    return status


def test_a_servers_exit_status_is_told(server: ForkServer, tmp_path: Path):
    assert ended(fork(server, tmp_path / "a", "exit", "7")) == 7
    serving = fork(server, tmp_path / "b", "serve")
    assert serving.exit_code() is None
    serving.stop()
    assert ended(serving) == -signal.SIGKILL


def test_a_server_is_forked_with_its_modules_and_without_those_of_the_trainer(server: ForkServer, tmp_path: Path):
    ended(fork(server, tmp_path / "a", "modules"))
    assert (tmp_path / "a").read_text().split() == ["True", "False", "False"]


def test_a_usage_error_has_no_traceback_on_top_and_an_exception_has_one(server: ForkServer, tmp_path: Path):
    assert ended(fork(server, tmp_path / "usage", "usage")) == 1
    assert "Traceback" not in (tmp_path / "usage").read_text()
    assert ended(fork(server, tmp_path / "raise", "raise")) == 1
    assert "RuntimeError: the reason" in (tmp_path / "raise").read_text()


def test_a_server_has_its_environment_without_the_trainers_allocator(stand_in: Path):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "x", "OURS": "1"}
    server = ForkServer(stand_in / "log", {"PYTHONPATH": str(stand_in), **settings})
    try:
        assert ended(fork(server, stand_in / "out", "environment")) == 0
    finally:
        server.stop()
    assert (stand_in / "out").read_text().strip() == "{'OURS'}"


def test_clients_that_vanish_or_talk_nonsense_or_keep_silent_delay_nobody(server: ForkServer, tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(server.socket_path)
        for said in (b"", b"{}\n", b"nonsense\n", json.dumps({"argv": ["exit", "0"]}).encode()):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(server.socket_path)
                client.sendall(said)
        assert ended(fork(server, tmp_path / "log", "exit", "3")) == 3
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # still connected, although the server did not wait for it
            silent.recv(1)
    server.raise_if_dead()


def test_a_server_ends_with_the_client_that_asked_for_it(server: ForkServer, tmp_path: Path):
    kept = fork(server, tmp_path / "kept", "serve")
    dropped = fork(server, tmp_path / "dropped", "serve")
    pid = dropped.pid
    dropped._answers.close()
    dropped._connection.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), Deadline(600, "the server to end"))
    assert kept.exit_code() is None
    kept.stop()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('half an install')", r"(?s)status 1.*half an install"),
        ("import os; os.kill(os.getpid(), 9)", "status -9"),
    ],
)
def test_a_preload_that_fails_or_is_killed_ends_the_wait_of_the_engines_at_once(stand_in: Path, code: str, why: str):
    (stand_in / "sglang" / "srt" / "plugins" / "__init__.py").write_text(f"{code}\n")
    server = ForkServer(stand_in / "log", {"PYTHONPATH": str(stand_in)})
    with pytest.raises(EngineError, match=r"cannot reach the process that preloads SGLang.*; see fork_server.log"):
        fork(server, stand_in / "engine", "serve")
    wait_until(lambda: _is_dead(server), Deadline(600, "the process to be collected"))
    with pytest.raises(EngineError, match=why):
        server.raise_if_dead()
    server.stop()


def _is_dead(server: ForkServer) -> bool:
    try:
        server.raise_if_dead()
    except EngineError:
        return True
    return False


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_sockets_directory_goes_with_the_process_or_its_owner(stand_in: Path, is_killed: bool):
    code = (
        "import sys, pathlib; from slime.backends.sglang_utils.fork_server import ForkServer\n"
        f"s = ForkServer(pathlib.Path({str(stand_in / 'log')!r}), {{'PYTHONPATH': {str(stand_in)!r}}})\n"
        "print(s.socket_path, flush=True); sys.stdin.readline(); s.stop()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    wait_until(path.exists, Deadline(600, "the socket"))
    if is_killed:
        owner.kill()
    else:
        owner.stdin.write("\n")
        owner.stdin.flush()
    owner.wait()
    wait_until(lambda: not path.parent.exists(), Deadline(600, "the directory to go"))


def test_a_client_that_gives_up_lets_go_so_that_a_late_server_ends(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        with pytest.raises(DeadlineExceeded, match="no answer from the preloading process") as given_up:
            ForkedServer(str(tmp_path / "socket"), [], env={}, log_path=tmp_path / "log", deadline=Deadline(0.1, "x"))
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5.0)
            while connection.recv(4096):
                pass
        del given_up  # it kept the client: the connection has ended all the same


def test_stopping_a_server_again_kills_nobody_who_has_its_number_now(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serving = fork(server, tmp_path / "log", "serve")
    serving.stop()
    killed: list[int] = []
    monkeypatch.setattr(fork_server, "kill_group", killed.append)
    serving.stop()
    assert killed == []


def test_no_fork_server_is_a_clear_error(tmp_path: Path):
    (tmp_path / "socket").touch()
    started = unloaded_time()
    with pytest.raises(EngineError, match="cannot reach the process that preloads SGLang"):
        ForkedServer(str(tmp_path / "socket"), [], env={}, log_path=tmp_path / "log", deadline=Deadline(600, "x"))
    assert unloaded_time() - started < 10
