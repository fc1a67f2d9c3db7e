"""Workers of Ray that are forked from a process that has imported the modules of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from slime.ray.engines.preloading import preloading
from slime.ray.run import cluster, worker_launcher
from slime.ray.run.worker_launcher import WORKER_FORKS, WORKER_ROLE, NotForked, differing, worker_of
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.process import has_ended, temporary_base

WORKER = """
import json, os, random, sys
facts = {"argv": sys.argv, "pid": os.getpid(), "directory": os.getcwd(), "path": sys.path[0]}
facts |= {"environment": dict(os.environ), "modules": list(sys.modules)}
if "torch" in sys.modules:
    import numpy, torch
    facts["drawn"] = [random.random(), float(numpy.random.rand()), float(torch.rand(1, dtype=torch.float64))]
print(json.dumps(facts), flush=True)
print("an error", file=sys.stderr, flush=True)
"""
TRAINER = "slime.backends.megatron_utils.actor"
PYTESTS = "PYTEST_CURRENT_TEST"  # another value in each phase of a test
FROM_SCRATCH = "import sys; print('from scratch', *sys.argv[1:])"


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ.pop(PYTESTS, None)
    log, env = tmp_path_factory.mktemp("log") / "log", {"OMP_NUM_THREADS": "1"}
    with preloading(log, env, trainer=TRAINER, has_engines=False):
        yield


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Scripts in place of Ray's."""
    (tmp_path / "default_worker.py").write_text(WORKER)
    (tmp_path / "setup_worker.py").write_text(FROM_SCRATCH)
    return tmp_path


def launched(scripts: Path, *words: str, **env: str) -> tuple[str, str]:
    """Output and errors of the worker, whichever way it starts."""
    given = {name: value for name, value in os.environ.items() if name != PYTESTS} | {"OMP_NUM_THREADS": "1"} | env
    command = [sys.executable, worker_launcher.__file__, str(scripts / "default_worker.py"), *words]
    with (scripts / "out").open("wb") as out, (scripts / "errors").open("wb") as errors:
        process = subprocess.run(command, stdout=out, stderr=errors, cwd=scripts, env=given)
    assert process.returncode == 0, (scripts / "errors").read_text()
    wait_until(lambda: (scripts / "out").read_text().endswith("\n"), Deadline(600, "the worker's output"))
    return (scripts / "out").read_text(), (scripts / "errors").read_text()


def context(**variables: str) -> str:
    return "--serialized-runtime-env-context=" + json.dumps({"env_vars": variables, "py_executable": sys.executable})


def test_a_forked_worker_is_like_a_new_process(preload: None, scripts: Path) -> None:
    out, _ = launched(scripts, "--language=PYTHON", "--a=1", context(RAY_TEST="of the actor"), RAY_OF_NODE="x")
    facts = json.loads(out)
    wait_until(lambda: "an error" in (scripts / "errors").read_text(), Deadline(600, "the worker's errors"))
    assert "slime.rollout.sglang_rollout" in facts["modules"]
    assert TRAINER not in facts["modules"]
    assert facts["argv"] == [str(scripts / "default_worker.py"), "--a=1"]
    assert facts["directory"] == facts["path"] == str(scripts)
    expected = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_OF_NODE": "x", "RAY_TEST": "of the actor"}
    expected.pop(PYTESTS)
    assert facts["environment"] == expected, "no variable of the process that preloads is left"


def test_a_trainer_rank_is_forked_from_a_process_with_its_modules(preload: None, scripts: Path) -> None:
    facts = json.loads(launched(scripts, **{WORKER_ROLE: "trainer"})[0])
    assert TRAINER in facts["modules"]


def test_forked_workers_draw_other_random_numbers_as_new_processes_do(preload: None, scripts: Path) -> None:
    first, second = (json.loads(launched(scripts)[0])["drawn"] for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True)), (first, second)


def test_an_actor_with_variables_that_modules_read_at_their_import_starts_from_scratch(
    preload: None, scripts: Path
) -> None:
    words = ["--language=PYTHON", context(ONEDNN_MAX_CPU_ISA="AVX2")]
    out, errors = launched(scripts, *words)
    assert out.split() == ["from", "scratch", str(scripts / "default_worker.py"), *words[:1], *words[1].split()]
    assert "its environment differs in ONEDNN_MAX_CPU_ISA" in errors


def test_without_the_process_that_preloads_a_worker_starts_from_scratch(scripts: Path, tmp_path: Path) -> None:
    for forks in (f"{2**22 + 1} {tmp_path}", f"{os.getpid()} {tmp_path}"):  # no such process, and no socket
        out, errors = launched(scripts, **{WORKER_FORKS: forks})
        assert out.startswith("from scratch")
        assert "a worker imports all modules itself, which takes seconds" in errors


def test_a_worker_in_a_container_or_with_another_python_is_left_to_ray() -> None:
    for given in ({"py_executable": "/other/python"}, {"command_prefix": ["nsys"]}, {"env_vars": {"A": "${B}"}}):
        with pytest.raises(NotForked, match="special way"):
            worker_of(["default_worker.py", "--serialized-runtime-env-context=" + json.dumps(given)])


def test_a_variable_that_is_absent_on_one_side_differs() -> None:
    assert differing({"A": "1", "B": "1", "RAY_X": "1"}, {"A": "1", "C": "1", "RAY_X": "2"}) == {"B", "C"}


def test_in_place_of_the_agent_of_the_dashboard_a_process_reports_no_service_and_ends_with_the_node(
    tmp_path: Path,
) -> None:
    agent = f"{sys.executable} {worker_launcher.__file__} --node-id=abc --session-dir={tmp_path} --head"
    node = ["sh", "-c", f"RAY_RAYLET_PID=$$ {agent} & read line"]
    with subprocess.Popen(node, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_until(lambda: len([*tmp_path.glob("*_port_abc")]) == 3, Deadline(60, "the ports"))
        process.communicate()  # until also the agent has closed its output
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("dashboard_agent_listen_port_abc", "metrics_agent_port_abc", "metrics_export_port_abc"), "-1"
    )


class _Actor:
    def process(self) -> tuple[int, int, str | None]:
        return os.getpid(), os.getppid(), os.environ.get("RAY_TEST")


def test_ray_takes_the_death_of_a_forked_worker_for_the_death_of_its_actor(
    preload: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.delenv(PYTESTS)
    monkeypatch.setenv("PYTHONBREAKPOINT", "")  # ray.init sets it: the environment of later tests would differ
    monkeypatch.delenv("PYTHONBREAKPOINT")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    folder = tmp_path_factory.getbasetemp() / "ray"
    if len(str(folder)) > 30:  # the path of a socket has at most 107 characters
        folder = temporary_base() / f"slime-preload-{os.getpid()}"
    server = int(os.environ[WORKER_FORKS].split()[0])
    try:
        cluster._start_embedded(1, folder)
        for kill in (lambda actor, pid: os.kill(pid, signal.SIGKILL), lambda actor, pid: ray.kill(actor)):
            actor: Any = ray.remote(_Actor).options(runtime_env={"env_vars": {"RAY_TEST": "1"}}).remote()
            pid, parent, variable = ray.get(actor.process.remote(), timeout=600)
            assert (parent, variable) == (server, "1")
            worker = psutil.Process(pid)
            kill(actor, pid)
            wait_until(partial(has_ended, worker), Deadline(600, "the worker to end"))  # ray.kill does not wait for it
            with pytest.raises(ray.exceptions.ActorDiedError):
                ray.get(actor.process.remote(), timeout=600)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
