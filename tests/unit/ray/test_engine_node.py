"""The part of an engine on another node than its first, without Ray."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slime.ray.engine_node import EngineNodeActor

_DEADLINE_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that goes on while any of its two schedulers lives, as SGLang does on other nodes than the first."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    names = [tmp_path / f"sglang::tp{rank}" for rank in range(2)]
    for name in names:
        name.symlink_to(sleep)
    process = subprocess.Popen(["sh", "-c", '"$0" 600 & "$1" 600 & wait', *map(str, names)], start_new_session=True)
    yield process
    for each in (*psutil.Process(process.pid).children(), process):
        each.kill()
    process.wait(_DEADLINE_S)


def test_a_part_is_lost_with_any_of_its_schedulers_even_if_its_server_goes_on(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    def schedulers() -> list[psutil.Process]:
        children = psutil.Process(server.pid).children()
        return [child for child in children if child.name().startswith("sglang::")]

    ends_at = time.monotonic() + _DEADLINE_S
    while len(schedulers()) < 2:
        assert time.monotonic() < ends_at
    part = EngineNodeActor.__new__(EngineNodeActor)
    part._name, part._log_path, part._parts = "engine 3 node 1", tmp_path / "engine_3.node1.log", {}
    part._server = SimpleNamespace(pid=server.pid, exit_code=server.poll)
    part.note_parts()
    assert part.lost() is None
    schedulers()[1].kill()
    while (lost := part.lost()) is None:
        assert time.monotonic() < ends_at
    assert server.poll() is None
    assert lost.startswith("engine 3 node 1 lost its process sglang::tp1 (")
