"""A waiting run names the missing resources of its cluster, with a real Ray that lacks them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.ray.watch.failure_report import Reports, Shortage

ROOT = Path(__file__).parents[3]

_START = """
import logging
import ray
logging.basicConfig(format="%(message)s")
ray.init(address="local", num_cpus=1, num_gpus=8, include_dashboard=False, log_to_driver=False, resources=OURS)
from slime.ray import placement_group
from slime.ray.watch import get

@ray.remote(num_cpus=1)
class Waiter:
    def wait_for(self, other):
        return get(other[0], 8.0, "another to start")

    def start(self):
        pass
"""
_SLOTS = """
try:
    placement_group._reserve(4, 8.0)
except Exception as error:
    print(type(error).__name__, error)
"""
_ACTORS = """
first, second = Waiter.options(num_cpus=0).remote(), Waiter.remote()
ray.get(second.start.remote())
third = Waiter.options(memory=2**40).remote()
for wait in (lambda: get([third.start.remote()], 8.0, "the third to start"),
             lambda: ray.get(first.wait_for.remote([third.start.remote()]))):
    try:
        wait()
    except Exception as error:
        print(type(error).__name__, error)
"""


def run(code: str, ours: str = "{}") -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _START.replace("OURS", ours) + code],
        env=os.environ | {"SLIME_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=ROOT,
    )
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def of_others() -> tuple[str, str]:
    """Output and reports of both programs on one cluster."""
    return run(_SLOTS + _ACTORS)


def test_a_cluster_of_others_without_processors_is_reported_soon_and_named_at_the_deadline(
    of_others: tuple[str, str],
) -> None:
    said, reported = of_others
    missing = "CPU: 4 asked for, 1 in the cluster, 1 free"
    assert f"s for Ray to reserve 4 device slots of 1 GPU and 1 CPU each: {missing}" in reported
    assert said.startswith("DeadlineExceeded gave up after")
    assert missing in said
    assert "GPU: 4 asked for" not in said, "of these there are enough"


def test_a_cluster_of_our_own_cannot_grow_so_the_start_fails_at_once() -> None:
    said, _ = run(_SLOTS, ours="{'slime_embedded': 1}")
    assert said.startswith("ConfigError the run needs 4 device slots")
    assert "CPU: 4 asked for, 1 in the cluster, 1 free; ask for fewer devices" in said


def test_an_actor_without_a_place_is_reported_with_what_it_lacks_whoever_waits_for_it(
    of_others: tuple[str, str],
) -> None:
    said, reported = of_others
    missing = "CPU: 1 asked for, 1 in the cluster, 0 free; memory: 1024.0 GiB asked for"
    assert "s for the third to start: Ray has no place for 1 x Waiter" in reported
    assert missing in reported
    assert said.count("Ray has no place for 1 x Waiter: " + missing) == 2, said


@pytest.mark.parametrize(
    ("asked", "is_final", "text"),
    [
        ({"GPU": 4}, False, "GPU: 4 asked for, 8 in the cluster, 2 free"),
        ({"GPU": 9}, True, "GPU: 9 asked for, 8 in the cluster, 2 free"),
        ({"GPU": 1, "CPU": 1}, False, "no node has enough of everything free (CPU: 1 asked for"),
        ({"TPU": 1}, True, "TPU: 1 asked for, 0 in the cluster, 0 free"),
    ],
)
def test_a_shortage_names_what_is_missing(asked: dict[str, float], is_final: bool, text: str) -> None:
    shortage = Shortage(asked, {"GPU": 8, "CPU": 4}, {"GPU": 2, "CPU": 4})
    assert str(shortage).startswith(text)
    assert shortage.is_final == is_final


def test_reports_come_within_seconds_and_then_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("slime.ray.watch.failure_report.time.monotonic", lambda: now[0])
    reports = Reports(_started=100.0)
    due = []
    for second in range(0, 200):
        now[0] = 100.0 + second
        if reports.is_due():
            due.append(second)
    assert due == [5, 65, 125, 185]
