"""The part of an engine on another node than its first, without Ray."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from slime.backends.sglang_utils.server_process import Activity, NodeServer
from slime.ray.engines import actor as actor_module
from slime.ray.engines.actor import EngineNodeActor, NodeSlot, RayOtherNode, pull_in_time
from slime.utils.errors import ConfigError, DeadlineExceeded
from slime.weight_sync import local_checkpoint
from tests.limits import unloaded_time

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

    ends_at = unloaded_time() + _DEADLINE_S
    while len(schedulers()) < 2:
        assert unloaded_time() < ends_at
    part = EngineNodeActor.__new__(EngineNodeActor)
    part._name, part._log_path = "engine 3 node 1", tmp_path / "engine_3.node1.log"
    part._server = NodeServer([], env={}, log_path=part._log_path)
    part._server.process = SimpleNamespace(pid=server.pid, exit_code=server.poll)
    part.note_parts()
    assert part.lost() is None
    schedulers()[1].kill()
    while (lost := part.lost()) is None:
        assert unloaded_time() < ends_at
    assert server.poll() is None
    assert lost.startswith("engine 3 node 1 lost its process sglang::tp1 (")


class Remote:
    """Ray with one actor: its calls end when the test lets them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.results: dict[str, Any] = {}  # by the name of the method

    def remote(self, *_: Any) -> Remote:
        return self

    def options(self, **_: Any) -> Remote:
        return self

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda: method)

    def wait(self, refs: list[str], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[str], list[str]]:
        assert timeout == 0, "the wait for one node must not hold up the others"
        return [ref for ref in refs if ref in self.results], [ref for ref in refs if ref not in self.results]

    def get(self, ref: str) -> Any:
        if isinstance(self.results[ref], Exception):
            raise self.results[ref]
        return self.results.pop(ref) if ref != "start" else None

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Remote:
    fake = Remote()
    for name in ("ray", "time"):
        monkeypatch.setattr(actor_module, name, fake)
    monkeypatch.setattr(actor_module, "worker_env", dict)
    return fake


def test_a_node_that_has_not_started_is_not_silent_and_one_that_has_is_lost_after_half_a_minute(remote: Remote) -> None:
    start = SimpleNamespace(place=SimpleNamespace(rank=3))
    node = RayOtherNode(NodeSlot(None, 0), start, 1, Path("log"))  # type: ignore[arg-type]
    node.start()
    for _ in range(100):  # imports its code from a cold file system
        assert node.lost() is None
        assert node.activity() is None
        remote.now += 6.0
    remote.results |= {"lost": None, "activity": Activity(5, 1.0, 2)}
    assert node.lost() is None
    assert node.activity() == Activity(5, 1.0, 2)
    remote.now += 1.0
    assert node.lost() is None
    remote.now += 29.0
    assert node.lost() is None
    remote.now += 2.0
    assert node.lost() == "engine 3 node 1 has not answered for 31 s"
    assert node.activity() == Activity(5, 1.0, 2)  # the last known one


def test_a_node_whose_start_fails_is_gone_with_the_cause(remote: Remote) -> None:
    start = SimpleNamespace(place=SimpleNamespace(rank=3))
    node = RayOtherNode(NodeSlot(None, 0), start, 2, Path("log"))  # type: ignore[arg-type]
    node.start()
    remote.results["start"] = RuntimeError("no free port")
    assert node.lost() == "engine 3 node 2 is gone: RuntimeError: no free port"


def test_a_node_keeps_an_adapter_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    part = EngineNodeActor.__new__(EngineNodeActor)
    node = RayOtherNode.__new__(RayOtherNode)
    node.name = "engine 3 node 1"
    node.handle = SimpleNamespace(stage_adapter=SimpleNamespace(remote=part.stage_adapter))
    waits: list[tuple[Any, ...]] = []

    def get(result: Any, *limits: Any) -> Any:
        waits.append(limits)
        return result

    monkeypatch.setattr(actor_module, "get", get)
    texts = node.stage_adapter(bytes(100_000), [], num_ranks=4, timeout_s=7.0)
    assert len(texts) == 4
    assert sum(map(len, texts)) < 10_000, "names of shared memory"
    assert waits == [(7.0, "engine 3 node 1 to keep the adapter", "--weight-sync-timeout")]


def test_a_copy_of_weights_that_a_file_system_holds_up_ends_with_its_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(local_checkpoint, "pull", lambda *args, timeout_s: is_over.wait(_DEADLINE_S))
    started = unloaded_time()
    with pytest.raises(
        DeadlineExceeded, match=r"engine 3 to bring its weights in /local to version 7 .*--weight-sync-t"
    ):
        pull_in_time("engine 3", "/shared", "/local", 7, timeout_s=0.1)
    assert unloaded_time() - started < _DEADLINE_S / 2
    is_over.set()


def test_an_error_of_the_copy_itself_is_what_the_caller_sees(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "stranger").touch()
    with pytest.raises(ConfigError, match="holds 'stranger' and was not made by slime"):
        pull_in_time("engine 3", str(tmp_path), str(tmp_path / "local"), 7, timeout_s=600)
