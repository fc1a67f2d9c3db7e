"""Engines join and leave a run through --engines-port. Slots, devices and servers elsewhere are fakes."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from slime.backends.sglang_utils.external import ExternalEngineInfo
from slime.backends.sglang_utils.topology import EnginePlace, WorkerType
from slime.ray.engines import elastic
from slime.ray.engines.elastic import ElasticEngines, ServedModel
from slime.ray.placement_group import GpuSlots
from slime.ray.rules import RULES
from slime.ray.run import engine_port
from slime.ray.run.engine_port import EnginePort
from slime.utils.async_utils import Slots, run
from slime.utils.errors import ConfigError, EngineError

_LONG = "9" * 5000


class Engines:
    """EngineSlots: an engine serves as soon as it joins."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.serving = dict.fromkeys(ranks, "serving")
        self.guests: list[int] = []
        self.joined = threading.Semaphore(0)

    def states(self) -> dict[int, tuple[str, str | None]]:
        return {rank: (state, f"http://h:{rank}") for rank, state in self.serving.items()}

    def join(self, rank: int, *, is_guest: bool = False) -> None:
        self.serving[rank] = "serving"
        self.guests += [rank] if is_guest else []
        self.joined.release()

    def leave(self, rank: int, reason: str) -> None:
        if len(self.serving) == 1:
            raise EngineError(f"engine {rank} cannot leave: no other engine serves.")
        del self.serving[rank]


class Servers(ElasticEngines):
    def __init__(self, width: int = 1, **changes: Any) -> None:
        self._args = Namespace(num_gpus_per_node=8, placement_timeout=1.0, rollout_num_engines=2)
        self._gpus = GpuSlots(None, range(2 * width), range(2 * width))
        self._places = {i: EnginePlace(i, WorkerType.REGULAR, i * width, width) for i in range(2)}
        self._external, self._joined, self._reserving = {}, {}, set()
        self._changing = threading.RLock()
        router = SimpleNamespace(url="http://router:1")
        model = {"ranks": (0, 1), "may_grow": True} | changes
        self.engines = Engines((0, 1))
        self._models = [ServedModel("actor", router, self.engines, True, **model)]  # type: ignore[arg-type]

    def call(self, method: Any, *arguments: Any) -> Any:
        """RemoteEngines.call, in this process."""
        return method(self, *arguments)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of Ray. Five devices are free."""
    asked: list[Any] = []

    def check_room(number: int) -> None:
        if number > 5:
            raise ConfigError(f"the engines that join need {number} free device slots, and this machine has 5.")

    def reserve(number: int, timeout_s: float) -> GpuSlots:
        asked.append(number)
        return GpuSlots(None, range(number), range(number))

    monkeypatch.setattr(Servers, "_check_room", staticmethod(check_room), raising=False)
    monkeypatch.setattr(Servers, "_reserve_engine", staticmethod(reserve), raising=False)
    monkeypatch.setattr(
        Servers, "_release", staticmethod(lambda groups: asked.append(-len(groups["joined"]))), raising=False
    )
    return asked


def grown(servers: Servers, count: int, new: int) -> None:
    servers.resize(count)
    for _ in range(new):
        assert servers.engines.joined.acquire(timeout=60)


def test_new_engines_get_devices_beyond_those_of_the_run_and_give_them_back(devices: list[Any]) -> None:
    servers = Servers(width=2)
    grown(servers, 4, new=2)
    assert devices == [2, 2]
    assert [servers._places[rank].first_slot for rank in (2, 3)] == [4, 6]
    servers.resize(2)
    assert sorted(servers.engines.serving) == [0, 1], "those that joined last leave first"
    for rank in (3, 2):
        servers._on_gone(rank)
    assert devices == [2, 2, -2, -2]
    assert sorted(servers._places) == [0, 1]
    assert servers._args.rollout_num_engines == 2


def test_an_engine_comes_back_to_the_devices_that_the_run_has_kept(devices: list[Any]) -> None:
    servers = Servers()
    servers.resize(1)
    servers._on_gone(1)
    assert servers._args.rollout_num_engines == 1
    grown(servers, 3, new=2)
    assert sorted(servers.engines.serving) == [0, 1, 2]
    assert devices == [1], "for one of the two"


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [
        (0, {}, "count 0: a run needs one engine at least"),
        (10**6, {}, "count 1000000: a run needs one engine at least, and 10000 at most"),
        (9, {}, "need 7 free device slots, and this machine has 5"),
        (3, {"may_grow": False}, "model actor: only regular engines that this run started can join by a count"),
    ],
)
def test_counts_that_cannot_be(devices: list[Any], count: int, changes: dict[str, Any], message: str) -> None:
    servers = Servers(**changes)
    with pytest.raises((ConfigError, EngineError), match=message):
        servers.resize(count)
    assert sorted(servers.engines.serving) == [0, 1]


def test_a_smaller_count_takes_back_engines_that_wait_for_devices(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, free, ended = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def reserve(number: int, timeout_s: float) -> GpuSlots:
        asked.release()
        assert free.wait(60)
        return GpuSlots(None, range(number), range(number))

    monkeypatch.setattr(Servers, "_reserve_engine", staticmethod(reserve))
    servers = Servers()
    note_number = servers._note_number
    monkeypatch.setattr(servers, "_note_number", lambda: (note_number(), ended.release()))
    servers.resize(6)
    assert asked.acquire(timeout=60)
    servers.resize(2)
    assert [engine["state"] for engine in servers.engine_states()] == ["serving", "serving"]
    servers.resize(3)
    assert asked.acquire(timeout=60)
    free.set()
    for _ in range(3 + 5):  # the three requests, and the five engines that waited
        assert ended.acquire(timeout=60)
    assert sorted(servers.engines.serving) == sorted(servers._places) == [0, 1, 6]
    assert devices == [-1], "the reservation that was under way"
    assert not asked.acquire(blocking=False), "the other three asked for none"


def test_an_engine_that_another_one_replaces_counts(devices: list[Any]) -> None:
    servers = Servers()
    servers.engines.serving[1] = "preempted"
    servers.resize(2)
    assert (devices, servers.engines.serving) == ([], {0: "serving", 1: "preempted"})


def test_engines_that_start_do_not_leave(devices: list[Any]) -> None:
    servers = Servers()
    servers.engines.serving[1] = "starting"
    servers.engines.serving[2] = "starting"
    with pytest.raises(EngineError, match="count 1: 2 engines would leave, and 1 have started"):
        servers.resize(1)


def answers(monkeypatch: pytest.MonkeyPatch, **info: Any) -> None:
    def discover(addresses: list[str], source: str) -> list[ExternalEngineInfo]:
        return [ExternalEngineInfo(f"http://{addresses[0]}", "h", 1, info.get("kind", "regular"), 1)]

    monkeypatch.setattr(elastic, "discover_external_engines", discover)
    monkeypatch.setattr(elastic, "problems_of", lambda info, args, source: [])


def test_a_server_of_others_joins_by_its_address_as_a_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    servers = Servers()
    servers.join_address("h:7")
    assert servers.engines.guests == [2]
    assert servers._external[2].url == "http://h:7"
    assert servers._args.rollout_num_engines == 3
    with pytest.raises(ConfigError, match="http://h:1: it is engine 1 of this run already"):
        servers.join_address("h:1")
    servers._places[1] = replace(servers._places[1], worker_type=WorkerType.DECODE)
    with pytest.raises(ConfigError, match="model actor has prefill engines"):
        servers.join_address("h:8")
    answers(monkeypatch, kind="prefill")
    with pytest.raises(ConfigError, match="it is a prefill engine, only regular ones can"):
        servers.join_address("h:8")


@pytest.fixture
def port(devices: list[Any]) -> Any:
    port = EnginePort(Servers(), 0)  # type: ignore[arg-type]
    yield port
    port.close()


def test_the_port_shows_changes_and_refuses(port: EnginePort) -> None:
    url = f"{port.url}/engines"
    assert [engine["engine"] for engine in httpx.get(url).json()["engines"]] == [0, 1]
    assert httpx.delete(f"{url}/1").json()["engines"] == [
        {"engine": 0, "model": "actor", "state": "serving", "url": "http://h:0"}
    ]
    refused = httpx.delete(f"{url}/0")
    assert (refused.status_code, refused.json()) == (409, {"error": "engine 0 cannot leave: no other engine serves."})
    assert "there is no engine 5. The engines are 0." in httpx.delete(f"{url}/5").json()["error"]
    assert len(httpx.post(url, json={"count": 2}).json()["engines"]) == 2


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b'{"count": "2"}', {}, 400, "has neither a whole number count nor a text address alone. Requests are: GET"),
        (b'{"count": true}', {}, 400, "count True must be a number"),
        (b'{"count": 2, "model": "x"}', {}, 400, "has neither"),
        (b"[1]", {}, 400, "has neither"),
        (b"{", {}, 400, "the body is not JSON"),
        (b"[" * 60_000, {}, 400, "the body is not JSON"),
        (b'{"count": 1e9}', {}, 400, "has neither"),
        (b'{"count": 2}', {"Content-Type": "text/plain"}, 400, "Content-Type must be application/json"),
        (b'{"count": 2}', {"Host": "evil.example"}, 404, "the header Host must be 127.0.0.1"),
    ],
)
def test_wrong_requests_change_nothing(
    port: EnginePort, body: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    answer = httpx.post(f"{port.url}/engines", content=body, headers={"Content-Type": "application/json"} | headers)
    assert answer.status_code == status
    assert message in answer.json()["error"]
    assert httpx.get(f"{port.url}/nothing").status_code == 404
    assert len(httpx.get(f"{port.url}/engines").json()["engines"]) == 2


@pytest.mark.parametrize(
    ("method", "path", "status"), [("DELETE", f"/engines/{_LONG}", 404), ("POST", "/engines", 400)]
)
def test_numbers_of_thousands_of_digits_are_refused(port: EnginePort, method: str, path: str, status: int) -> None:
    client = http.client.HTTPConnection(port.url.removeprefix("http://"), timeout=60)
    client.request(method, path, headers={"Content-Type": "application/json", "Content-Length": _LONG})
    assert client.getresponse().status == status
    client.close()


def test_a_client_that_sends_no_end_does_not_delay_the_end_of_the_run(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, handle = threading.Event(), engine_port._Handler.handle

    def noted(handler: Any) -> None:
        has_begun.set()
        handle(handler)

    monkeypatch.setattr(engine_port._Handler, "handle", noted)
    monkeypatch.setattr(engine_port._Handler, "timeout", 600.0)
    monkeypatch.setattr(engine_port, "_STOP_TIMEOUT_S", 0.1)
    port = EnginePort(Servers(), 0)  # type: ignore[arg-type]
    with socket.create_connection(("127.0.0.1", int(port.url.rpartition(":")[2]))) as slow:
        slow.sendall(b"POST /engines HTTP/1.0\r\nHost: localhost\r\n")
        assert has_begun.wait(60)
        port.close()
        assert port._thread.is_alive(), "the request is still under way"
    port._thread.join(60)
    assert not port._thread.is_alive()


def test_a_port_in_use_is_named(port: EnginePort) -> None:
    number = int(port.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"--engines-port {number}: cannot listen at 127.0.0.1"):
        EnginePort(Servers(), number)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engines_port": 70000}, "a port is a number from 0"),
        ({"colocate": True}, "with --colocate the engines take turns with the trainer on its devices"),
        ({"debug_train_only": True}, "--debug-train-only starts no engine"),
    ],
)
def test_runs_whose_engines_cannot_change(values: dict[str, Any], message: str) -> None:
    rule = next(rule for rule in RULES if rule.__name__ == "_engines_port")
    args = {"engines_port": 0, "colocate": False, "debug_train_only": False}
    assert list(rule(Namespace(**args))) == []
    (problem,) = rule(Namespace(**args | values))
    assert message in problem


def test_more_samples_run_at_once_after_engines_have_joined() -> None:
    async def held(slots: Slots, grow_to: int) -> int:
        for _ in range(slots.number):
            await slots.semaphore.acquire()
        slots.grow(grow_to)
        await asyncio.sleep(0)
        count = 0
        while not slots.semaphore.locked():
            await slots.semaphore.acquire()
            count += 1
        return count

    assert run(held(Slots(2), 5)) == 3
    assert run(held(Slots(2), 1)) == 0
