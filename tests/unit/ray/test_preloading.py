"""Which engine gets which process to fork from, and when the process counts as ended."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from slime.ray.engines import preloading
from slime.ray.engines.preloading import (
    FORK_SERVER,
    ClusterForkServer,
    fork_server_log,
    fork_server_of,
)
from slime.ray.run.worker_launcher import WORKER_FORKS
from slime.utils.errors import EngineError


class StandIn:
    """A fake of ``ForkServer``: a process that imports nothing."""

    def __init__(
        self, log_path: Path, env: Mapping[str, str], command: Sequence[str] = (), pass_fds: Sequence[int] = ()
    ) -> None:
        self.socket_path, self.env = str(log_path.with_name("socket of it")), env
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_text("cannot import sglang\n")
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        self.pid = self._process.pid

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(preloading, "ForkServer", StandIn)
    monkeypatch.delenv(FORK_SERVER, raising=False)
    return Namespace(output_dir=str(tmp_path), experiment_name="run", save=None)


def test_inside_a_cluster_that_preloads_everybody_uses_its_process_until_it_ends(args: Namespace) -> None:
    with preloading.preloading(fork_server_log(args), {"OMP_NUM_THREADS": "1"}, trainer=None, has_engines=True):
        shared = fork_server_of(fork_server_log(args))
        assert isinstance(shared, ClusterForkServer)
        assert shared.socket_path.endswith("/run/engines/socket of it")
        shared.stop()
        shared.raise_if_dead()
    assert FORK_SERVER not in os.environ
    assert WORKER_FORKS not in os.environ
    with pytest.raises(EngineError, match=r"(?s)preloads SGLang \(pid \d+\) has ended.*cannot import sglang"):
        shared.raise_if_dead()


def test_elsewhere_everybody_starts_one(args: Namespace) -> None:
    own = fork_server_of(fork_server_log(args))
    assert isinstance(own, StandIn)
    own.stop()
