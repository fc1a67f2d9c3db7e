"""When the imports of a run begin, which engine gets which process to fork from, and when the process has ended."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest

from slime.backends.sglang_utils.fork_server import ForkedServer
from slime.ray.engines import preloading
from slime.ray.engines.preloading import (
    FORK_SERVER,
    FORK_SERVER_LOG,
    ClusterForkServer,
    engine_log_directory,
    fork_server_of,
    forks_env,
    imports_begun,
)
from slime.ray.run.worker_launcher import WORKER_FORKS
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import EngineError


class StandIn:
    """A fake of ``ForkServer`` without a process."""

    def __init__(self, log_path: Path, env: Mapping[str, str]) -> None:
        self.log_path, self.env = log_path, env


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """A run whose torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('cannot import torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(FORK_SERVER, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return Namespace(output_dir=str(tmp_path), experiment_name="run", save=None)


def test_inside_a_cluster_that_preloads_everybody_uses_its_process_until_it_ends(args: Namespace) -> None:
    log = engine_log_directory(args) / FORK_SERVER_LOG
    with preloading.preloading(log, {"OMP_NUM_THREADS": "1"}, trainer=None, has_engines=True):
        shared = fork_server_of(log)
        assert isinstance(shared, ClusterForkServer)
        folder = Path(os.environ[WORKER_FORKS].split()[1])
        assert Path(shared.socket_path).is_relative_to(folder)
        wait_until(lambda: "cannot import torch" in log.read_text(), Deadline(600, "the error of the import"))
        with pytest.raises(EngineError, match="cannot reach the process that preloads SGLang"):
            ForkedServer(
                shared.socket_path, [], env={}, log_path=log.with_name("0"), deadline=Deadline(600, "the fork")
            )
        assert (folder / "worker").exists()
    assert FORK_SERVER not in os.environ
    assert WORKER_FORKS not in os.environ
    with pytest.raises(EngineError, match=r"(?s)preloads SGLang \(pid \d+\) has ended.*cannot import torch"):
        shared.raise_if_dead()


def test_elsewhere_everybody_starts_one(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "ForkServer", StandIn)
    own = fork_server_of(engine_log_directory(args) / FORK_SERVER_LOG)
    assert isinstance(own, StandIn)
    assert own.log_path == engine_log_directory(args) / FORK_SERVER_LOG


@pytest.mark.parametrize("is_changed", [False, True], ids=["same variables", "a user's function has set a variable"])
def test_a_run_uses_the_imports_that_began_before_its_flags_were_read(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    with imports_begun(["--hf-checkpoint", "model"]):
        process = preloading._begun[0].process
        if is_changed:
            monkeypatch.setenv("READ_BY_A_MODULE", "1")
        monkeypatch.setenv("RAY_READ_LATER", "1")
        with preloading.preloading(
            engine_log_directory(args) / FORK_SERVER_LOG, forks_env(), trainer=None, has_engines=False
        ):
            used = int(os.environ[WORKER_FORKS].split()[0])
            assert (used == process.pid) is not is_changed
            assert FORK_SERVER not in os.environ
        assert not preloading.is_running(used)
    assert not preloading.is_running(process.pid)


def test_imports_of_a_command_line_that_starts_no_run_end(args: Namespace) -> None:
    with imports_begun([]):
        process = preloading._begun[0].process
        assert process.exit_code() is None
    assert process.exit_code() is not None
    assert not preloading._begun


@pytest.mark.parametrize(
    ("word", "variables"),
    [
        ("--help", {}),
        ("--help-all", {}),
        ("--fp32", {"RAY_ADDRESS": "node:6379"}),
        ("--fp32", {"SLIME_ACCELERATOR": "cuda"}),
        ("--fp32", {"SLIME_ACCELERATOR": "unknown"}),
    ],
)
def test_no_import_begins_for_help_in_an_existing_cluster_and_on_a_gpu(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, word: str, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with imports_begun([word]):
        assert not preloading._begun
