"""A launch script stops the Ray that it started, with all child processes. A Ray that runs already is used and kept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.limits import unloaded_time
from tests.unit.scripts.bash_arrays import ROOT
from tests.unit.scripts.dry_run import SCRIPTS

DEADLINE_S = 30
SCRIPT = SCRIPTS / "run-qwen3-4B.sh"


class World:
    """A directory with a model and data, a fake ray on PATH and a free port for its job server."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        programs = root / "bin"
        programs.mkdir()
        (programs / "ray").symlink_to(Path(__file__).parent / "fake_ray")
        (programs / "python3").symlink_to(sys.executable)
        for name in ("Qwen3-4B/config.json", "dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).touch()
        self.log = root / "ray.log"
        self.log.touch()
        self.env = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "BASE_DIR": str(root),
            "TMPDIR": str(root),
            "RAY_LOG": str(self.log),
            "RAY_DASHBOARD": f"http://127.0.0.1:{self.port}",
            "RAY_STOP_TIMEOUT_S": "2",
            "NUM_GPUS": "8",
        }

    def start(self, script: Path = SCRIPT, *flags: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(script), *flags],
            env=self.env | env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell that put this test into its background has SIGINT ignored, which children inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, script: Path = SCRIPT, *flags: str, **env: str) -> tuple[int, str]:
        with self.start(script, *flags, **env) as process:
            output = end_of(process)
        return process.returncode, output

    def calls(self, verb: str) -> list[str]:
        """Recorded calls of ray: ``calls("job submit")``."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(f"ray {verb}")]

    def pids(self) -> list[int]:
        """Processes of the fake Ray: itself and its child."""
        return [
            int(word) for line in self.log.read_text().splitlines() if line[:4] == "pids" for word in line.split()[1:]
        ]


def end_of(process: subprocess.Popen[str]) -> str:
    """The output of a script that ends in time. A late one is killed, or leaving its ``with`` would wait too."""
    try:
        return process.communicate(timeout=DEADLINE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    left = [pid for pid in world.pids() if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = unloaded_time() + DEADLINE_S
    while not condition():
        assert unloaded_time() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def running_ray(world: World) -> Iterator[None]:
    """A job server that another program started."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", world.port), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


def test_without_a_ray_one_is_started_for_the_job_and_stopped_with_its_children(world: World) -> None:
    status, output = world.run()
    assert (status, len(world.calls("start")), len(world.calls("job submit"))) == (0, 1, 1), output
    assert len(world.pids()) == 2
    ports = [word for word in world.calls("start")[0].split() if word.isdigit() and 1024 < int(word) != 6379]
    assert len(set(ports)) == 2, "the dashboard agent and the client server get ports of their own"
    wait_until(lambda: not any(map(is_running, world.pids())), "the fake Ray or its child is still there")


def test_a_ray_that_asks_for_a_token_is_told_the_token(world: World) -> None:
    """Ray answers 401 on a machine where it once made a token, and its job client does not send one by default."""
    assert world.run(FAKE_STATUS="401", WANTED_AUTH_MODE="token")[0] == 0


def test_a_ray_that_ignores_the_polite_signal_is_ended_all_the_same(world: World) -> None:
    assert world.run(FAKE_START="ignore")[0] == 0
    wait_until(lambda: not any(map(is_running, world.pids())), "the fake Ray or its child is still there")


@pytest.mark.usefixtures("running_ray")
def test_a_running_ray_is_used_and_left_alone(world: World) -> None:
    status, output = world.run()
    assert status == 0, output
    assert "using the Ray at" in output
    assert not world.calls("start")
    assert not world.calls("stop")
    assert not world.calls("job stop")


@pytest.mark.usefixtures("running_ray")
def test_the_status_of_the_job_is_that_of_the_script(world: World) -> None:
    assert world.run(FAKE_JOB="exit 7")[0] == 7


@pytest.mark.usefixtures("running_ray")
def test_a_ray_that_takes_no_jobs_yet_is_asked_again(world: World) -> None:
    """Ray's job server answers some seconds before a node can run a job."""
    status, output = world.run(FAKE_BUSY="2", FAKE_JOB="echo noise >&2; exit 3")
    assert (status, len(world.calls("job submit"))) == (3, 3)
    assert "noise" in output


@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_job_that_the_script_submitted(world: World, number: int, status: int) -> None:
    with world.start(FAKE_JOB="exec sleep 300") as process:
        wait_until(lambda: world.calls("job submit"), "no job was submitted")
        process.send_signal(number)
        end_of(process)
    assert process.returncode == status
    (submit,), (stop,) = world.calls("job submit"), world.calls("job stop")
    (name,) = [word.partition("=")[2] for word in submit.split() if word.startswith("--submission-id=")]
    assert stop.split()[-1] == name


def test_a_signal_ends_the_ray_of_the_script_too(world: World) -> None:
    with world.start(FAKE_JOB="exec sleep 300") as process:
        wait_until(lambda: world.calls("job submit"), "no job was submitted")
        process.send_signal(signal.SIGTERM)
        end_of(process)
    wait_until(lambda: not any(map(is_running, world.pids())), "the fake Ray or its child is still there")


def test_a_ray_that_does_not_start_is_reported_with_its_output(world: World) -> None:
    status, output = world.run(FAKE_START="fail")
    assert status == 2
    assert "port 6379 is taken" in output
    assert "ray start failed" in output
    assert not world.calls("job submit")


def test_a_ray_that_never_answers_ends_in_an_error_and_is_ended(world: World) -> None:
    status, output = world.run(FAKE_START="silent", RAY_START_TIMEOUT_S="1")
    assert status == 2
    assert "did not answer" in output
    wait_until(lambda: not any(map(is_running, world.pids())), "the fake Ray or its child is still there")


def test_every_path_that_is_missing_is_named_before_anything_starts(world: World) -> None:
    status, output = world.run(SCRIPT, "--prompt-data", "/missing/a.jsonl@[0:10]", MODEL_DIR="/missing", REF_LOAD="/no")
    assert status == 2
    for words in ("--hf-checkpoint /missing/Qwen3-4B does not", "--ref-load /no does not", "/missing/a.jsonl does not"):
        assert words in output
    assert "aime" not in output
    assert not world.calls("")


def test_a_slice_is_not_part_of_a_file_name(world: World) -> None:
    data = f"{world.env['BASE_DIR']}/dapo-math-17k/dapo-math-17k.jsonl@[0:10]"
    assert world.run(SCRIPT, "--prompt-data", data)[0] == 0


def test_a_plan_needs_no_ray(world: World, tmp_path: Path) -> None:
    """The entry script runs by itself, with the environment of the job."""
    python = tmp_path / "bin" / "python3"
    python.unlink()
    python.write_text('#!/usr/bin/env bash\necho "${CUDA_DEVICE_MAX_CONNECTIONS}" "$1" "${@: -1}"\n')
    python.chmod(0o755)
    status, output = world.run(SCRIPT, "--plan")
    assert (status, output.split()) == (0, ["1", f"{ROOT}/train.py", "--plan"])
    assert not world.calls("")


@pytest.mark.usefixtures("running_ray")
def test_the_engine_file_of_glm_5_2_divides_all_its_gpus(world: World, tmp_path: Path) -> None:
    env = {"HF_CHECKPOINT": f"{tmp_path}/Qwen3-4B", "SAVE_DIR": str(tmp_path / "save")}
    script = SCRIPTS / "run-glm5.2-744B-A40B.sh"
    assert world.run(script, **env)[0] == 0
    (model,) = yaml.safe_load((tmp_path / "save" / "sglang.yaml").read_text())["sglang"]
    assert sum(group["num_gpus"] for group in model["server_groups"]) == 32 * 8
    (tmp_path / "own.yaml").write_text("mine")
    assert world.run(script, **env, SGLANG_CONFIG_FILE=str(tmp_path / "own.yaml"))[0] == 0
    assert (tmp_path / "own.yaml").read_text() == "mine"


def test_several_nodes_need_a_cluster_or_a_list_of_hosts(world: World) -> None:
    status, output = world.run(SCRIPT, NUM_GPUS="4")  # all of one small node
    assert status == 0, output
    script = SCRIPTS / "run-qwen3-30B-A3B.sh"
    status, output = world.run(script, NUM_GPUS="4", HF_CHECKPOINT=f"{world.env['BASE_DIR']}/Qwen3-4B")
    assert status == 2
    assert "needs 2 nodes of 4 GPUs" in output
    assert "HOSTFILE" in output


def test_hosts_of_the_file_join_by_ssh(world: World, tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/usr/bin/env bash\necho "ray ssh $*" >>"${RAY_LOG}"\n[[ "$*" != *"${BAD_HOST:-nobody}"* ]]\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("# head\n127.0.0.2\n\n127.0.0.3 slots=8\n")
    env = {"NUM_GPUS": "4", "MASTER_ADDR": "127.0.0.2", "HOSTFILE": str(tmp_path / "hosts")}
    env["HF_CHECKPOINT"] = f"{tmp_path}/Qwen3-4B"
    script = SCRIPTS / "run-qwen3-30B-A3B.sh"
    status, output = world.run(script, **env)
    assert status == 0, output
    (joined,) = world.calls("ssh")
    assert "127.0.0.3" in joined
    assert "--address '127.0.0.2:6379'" in joined
    status, output = world.run(script, **env, BAD_HOST="127.0.0.3")
    assert status == 2
    assert "ray start failed over ssh on: 127.0.0.3" in output
