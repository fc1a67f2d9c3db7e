"""The start of an embedded cluster on a machine that is busy."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.ray.run import cluster
from slime.utils.errors import StartFailed

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
