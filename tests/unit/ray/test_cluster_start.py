"""The start of an embedded cluster on a machine that is busy."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from ray._private import parameter, services, utils

from slime.ray.run import cluster
from slime.utils.errors import StartFailed

RECORDS = "RAY_task_events_report_interval_ms"
TIMED_OUT = "The current node timed out during startup. This could happen because the GCS has become overloaded."


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Processes of the attempts. Each attempt times out, as Ray's does, and leaves a daemon."""
    daemons: list[subprocess.Popen[bytes]] = []

    def attempt(slots: int, directory: Path) -> None:
        daemons.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]))
        raise Exception(TIMED_OUT)  # Ray raises the base class

    monkeypatch.setattr(cluster, "_init_embedded", attempt)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    return daemons


def test_ray_is_started_twice_before_the_start_fails(
    started: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(StartFailed, match=r"timed out during startup\. It was started"),
    ):
        cluster._start_embedded(2, Path("unused"))
    assert [record.getMessage() for record in caplog.records] == [
        "Ray did not start: The current node timed out during startup. It is started once more."
    ]
    assert [daemon.wait() for daemon in started] == [-9, -9], "no daemon of an attempt is left"


def test_a_second_attempt_that_succeeds_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = [Exception(TIMED_OUT), None]

    def attempt(slots: int, directory: Path) -> None:
        if (error := results.pop(0)) is not None:
            raise error

    monkeypatch.setattr(cluster, "_init_embedded", attempt)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    cluster._start_embedded(2, Path("unused"))
    assert results == []


@pytest.mark.parametrize("name", ["", ".ray"])
def test_a_home_that_cannot_be_written_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(slots: int, directory: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(Path("/proc/absent", name)))  # as Ray does

    monkeypatch.setenv("HOME", "/proc/absent")
    monkeypatch.setattr(cluster, "_init_embedded", attempt)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    with pytest.raises(StartFailed, match=r"set HOME \(/proc/absent\) to a folder that can be written"):
        cluster._start_embedded(2, Path("unused"))


@pytest.mark.parametrize(("engines_port", "slots"), [(None, 2), (0, 10)])
def test_ray_keeps_no_record_of_calls_and_has_room_for_engines_that_join(
    engines_port: int | None, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of 1,000 short rollouts took 63 MB."""
    seen: list[tuple[int, str | None]] = []
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in (RECORDS, "RAY_ADDRESS")})
    monkeypatch.setattr(cluster, "_init_embedded", lambda slots, folder: seen.append((slots, os.environ.get(RECORDS))))
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "start_reaper", lambda folder: None)
    monkeypatch.setattr(cluster, "followed", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "preloading", lambda *_, **__: contextlib.nullcontext())
    args = {"debug_rollout_only": False, "debug_train_only": True, "world_size": 2, "colocate": False}
    args |= {"rollout_num_gpus": 0, "rollout_external": False, "engines_port": engines_port}
    args |= {"train_backend": "megatron", "output_dir": "outputs", "experiment_name": "run"}
    with cluster.running_cluster(Namespace(**args)):
        assert seen == [(slots, "0")]


def test_a_node_of_a_cpu_starts_without_the_services_that_no_run_uses() -> None:
    def replaced() -> list[Any]:
        of_services = (services.start_api_server, services.get_node, services.start_ray_process)
        return [parameter.RayParams, utils.get_dashboard_dependency_error, *of_services]

    before = replaced()
    with cluster._lean_node():
        settings = parameter.RayParams(num_cpus=3)
        assert (settings.num_cpus, settings.no_monitor, settings.include_log_monitor) == (3, True, False)
        assert services.start_api_server(False, host="127.0.0.1") == ("", None), "an address and a process"
        assert not set(replaced()) & set(before)
    assert replaced() == before


def test_a_node_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within the limit of the test: the wait for a node that works is longer."""
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sleep")
    left = [3]

    def get_node(*words: str) -> Any:
        left[0] -= 1
        if not left[0]:
            node.kill()  # not waited for, so it is a zombie, as Ray's is
        raise RuntimeError("not registered")

    monkeypatch.setattr(services, "get_node", get_node)
    with (
        subprocess.Popen([raylet, "1000"]) as node,
        cluster._lean_node(),
        pytest.raises(RuntimeError, match="not registered"),
    ):
        services.get_node("address", "id")
    assert left[0] <= 0, "it was waited for as long as it worked"


def test_a_node_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [RuntimeError("not registered"), RuntimeError("not registered"), {"node": 1}]

    def get_node(*words: str) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    with cluster._lean_node():
        assert services.get_node("address", "id") == {"node": 1}
    assert answers == []
