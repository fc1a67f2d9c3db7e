"""The evaluation of a soak: growth after the warm-up, and the goals."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks import soak


def line(rollout: int, **values: float) -> dict[str, Any]:
    quantities = {"memory_mb": 100.0, "fds": 20, "threads": 5} | values
    return {"rollout": rollout, "processes": {"engine 7": quantities}, "run": {"store_mb": 1.0, "run_files": 9}}


def test_memory_that_grows_after_the_warm_up_misses_its_goal() -> None:
    lines = [line(n, memory_mb=100 + n / 100, fds=20 + n // 400) for n in range(0, 1001, 10)]
    number, found = soak.growths(lines)
    assert number == 800
    assert found["engine 7"]["memory_mb"] == pytest.approx(10.0)
    missed = soak.misses(found)
    assert missed[0] == "engine 7: memory_mb grows by 10.0 per 1,000 rollouts"
    assert "fds" in missed[1]
    assert len(missed) == 2
    assert "| engine | +10.0 MB | +" in soak.page_part(number, {**found, "run": found["run"] | ALL})


ALL = {"shm_mb": 0.0, "store_mb": 0.0, "run_files": 0.0, "tmp_files": 0.0}


def test_growth_in_the_warm_up_and_a_short_peak_do_not_count() -> None:
    lines = [line(n, memory_mb=min(100.0, n), threads=50 if n == 700 else 5) for n in range(0, 1001, 10)]
    assert soak.misses(soak.growths(lines)[1]) == []


def test_a_process_has_memory_descriptors_and_threads() -> None:
    name, values = soak._of_process(os.getpid())  # type: ignore[misc]
    assert name
    assert 1 < values["memory_mb"] < 1e5
    assert values["fds"] > 2
    assert values["threads"] >= 1
    assert soak._of_process(2**22 + 1) is None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::TrainActor.train", "ray::TrainActor"),
        ("python -m slime.utils.reaper 3", "slime.utils.reaper"),
        ("/usr/bin/python /x/train.py --lr 1", "train.py"),
        ("/x/ray/core/gcs_server --log", "gcs_server"),
    ],
)
def test_processes_have_short_names(command: str, name: str) -> None:
    assert soak.name_of(command) == name
