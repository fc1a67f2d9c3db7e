"""The output of actors arrives in ``run.log``, complete, from files and from Ray's log monitors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher as ray_lines

from slime.observability.logging_utils import RUN_LOG
from slime.ray.run.cluster import WorkerLogs, followed, received
from tests.limits import Limit

WARNING = "[2026-11-23 07:00:00 rollout] WARNING collect.py:3 - short of time"


@pytest.fixture(autouse=True)
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run.log"
    RUN_LOG.open(path)
    yield path
    RUN_LOG.close()


def test_lines_carry_the_class_and_pid_of_their_actor(tmp_path: Path, log: Path) -> None:
    (tmp_path / "worker-ab12-01000000-77.out").write_text(":job_id:01\n:actor_name:RolloutManager\nprinted\n")
    (tmp_path / "worker-ab12-01000000-77.err").write_text(f":actor_name:RolloutManager\n{WARNING}\n")
    (tmp_path / "gcs_server.out").write_text("not of an actor\n")
    (tmp_path / "raylet.err").write_text("out of memory\n")
    WorkerLogs(tmp_path).look()
    assert sorted(log.read_text().splitlines()) == [
        WARNING,
        "[RolloutManager 77] printed",
        "[raylet] out of memory",
    ]


def test_half_a_line_waits_for_its_end_or_that_of_the_run(tmp_path: Path, log: Path) -> None:
    source, logs = tmp_path / "worker-a-1-7.out", WorkerLogs(tmp_path)
    for part, expected in (("a bit", ""), (" more\nand", "a bit more\n"), ("", "a bit more\n")):
        with source.open("a") as file:
            file.write(part)
        logs.look()
        assert log.read_text() == expected.replace("a bit", "[worker-a-1-7] a bit")
    logs.look(is_over=True)
    assert log.read_text().splitlines()[-1] == "[worker-a-1-7] and"


def test_what_is_written_last_is_read_after_the_block(tmp_path: Path, log: Path) -> None:
    folder = tmp_path / "later"
    with followed(folder):
        folder.mkdir()
        (folder / "worker-a-1-7.err").write_text("first\n")
        limit = Limit(10)
        while not log.read_text() and not limit.is_over:
            threading.Event().wait(0.05)
        assert "first" in log.read_text()
        (folder / "worker-a-1-7.err").open("a").write("last words")
    assert log.read_text().splitlines()[-1].endswith("last words")


def test_lines_of_other_nodes_come_without_rays_prefix(
    log: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.ray.run.cluster._DRAIN_S", 0.0)
    ray_lines.add_handler("ray_print_logs", print)
    try:
        with received():
            batch = {"pid": 7, "ip": "10.0.0.2", "is_err": True, "actor_name": "TrainActor", "lines": [WARNING, "x"]}
            ray_lines.emit(batch)
            ray_lines.emit({"pid": "raylet", "ip": "10.0.0.2", "is_err": True, "lines": ["node is full"]})
            ray_lines.emit({"pid": "autoscaler", "ip": "10.0.0.2", "is_err": True, "lines": ["Total Usage:"]})
        assert [name for name, _ in ray_lines.handlers] == ["ray_print_logs"], "Ray prints again"
    finally:
        ray_lines.remove_handler("ray_print_logs")
    assert log.read_text().splitlines() == [WARNING, "[TrainActor 7 on 10.0.0.2] x", "[raylet] node is full"]
    seen = capfd.readouterr()
    assert seen.out == ""
    assert seen.err == "warning: rollout: short of time\nwarning: raylet: node is full\n"
