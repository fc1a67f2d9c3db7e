"""The calls of an engine against a server whose answers the test sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from slime.backends.sglang_utils import engine as engine_module
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.router import remove_worker
from slime.utils.errors import DeadlineExceeded, EngineError

SERVERS_KEEPALIVE_S = 5.0
NO_ANSWER = 0  # the server closes the connection


class Server:
    """Answers ``METHOD /path`` from a table. Remembers calls and the ports that they came from."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.calls: list[str] = []
        self.clients: set[int] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                call = f"{self.command} {self.path}"
                server.calls.append(call)
                server.clients.add(self.client_address[1])
                status, body = server.answers.get(call, (404, {"error": "no such route"}))
                if status == NO_ANSWER:
                    self.close_connection = True
                    return
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def engine(server: Server, tmp_path: Path) -> SGLangEngine:
    return SGLangEngine(EngineSpec(4, "127.0.0.1", server.port, [], {}, tmp_path / "log"))


def test_the_requests_of_every_scheduler_are_added_up(engine: SGLangEngine, server: Server):
    loads = [{"num_running_reqs": 2, "num_waiting_reqs": 3}, {"num_running_reqs": 1, "num_waiting_reqs": 0}]
    server.answers["GET /v1/loads?include=core"] = (200, {"loads": loads})
    assert engine.num_requests() == 6


def test_an_engine_is_registered_when_the_router_lists_it(engine: SGLangEngine, server: Server, monkeypatch):
    server.answers["POST /workers"] = (202, {"location": "/workers/b"})
    server.answers["GET /workers"] = (200, {"workers": [{"url": "http://other:1", "id": "a"}]})
    monkeypatch.setattr(engine_module, "_REGISTER_TIMEOUT_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=rf"the router at {server.url} to take engine 4\. It must reach http"):
        engine.register(server.url)
    server.answers["GET /workers"] = (200, {"workers": [{"url": engine.url, "id": "b"}]})
    engine.register(server.url)


def test_the_router_forgets_the_engine_of_an_address_alone(engine: SGLangEngine, server: Server):
    workers = [{"url": "http://other:1", "id": "a"}, {"url": engine.url, "id": "b"}]
    server.answers |= {"GET /workers": (200, {"workers": workers}), "DELETE /workers/b": (202, {})}
    remove_worker(server.url, engine.url)
    assert server.calls == ["GET /workers", "DELETE /workers/b"]


def test_a_router_that_does_not_know_the_engine_is_left_alone(engine: SGLangEngine, server: Server):
    server.answers["GET /workers"] = (200, {"workers": []})
    remove_worker(server.url, engine.url)
    assert server.calls == ["GET /workers"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, "out of memory"), r"engine 4 .* refused model_info: status 500: out of memory"),
        ((200, {"success": False, "message": "busy"}), r"engine 4 .* refused model_info: status 200.*busy"),
        ((200, {"other": 1}), r"engine 4 .*no 'weight_version' in .*other"),
        ((200, "not json"), r"engine 4 .*no 'weight_version' in not json"),
    ],
)
def test_an_answer_that_does_not_hold_what_it_must_is_an_engine_error(
    engine: SGLangEngine, server: Server, answer: tuple[int, Any], message: str
):
    server.answers["GET /model_info"] = answer
    with pytest.raises(EngineError, match=message):
        engine.weight_version()


def test_a_server_that_closes_the_connection_and_then_ends_is_reported_with_its_log(
    engine: SGLangEngine, server: Server, tmp_path: Path
):
    (tmp_path / "log").write_text("RuntimeError: the cause")
    statuses = iter([None, None, None])
    engine._server.process = SimpleNamespace(exit_code=lambda: next(statuses, -9))  # type: ignore[assignment]
    server.answers["POST /end_weight_update"] = (NO_ANSWER, "")
    with pytest.raises(EngineError, match=r"(?s)died with status -9.*RuntimeError: the cause"):
        engine.end_weight_update()


def test_leaving_a_group_that_a_fresh_engine_never_joined_is_fine(engine: SGLangEngine, server: Server):
    server.answers["POST /destroy_weights_update_group"] = (400, {"success": False})
    engine.destroy_weights_update_group("g")
    assert server.calls == ["POST /destroy_weights_update_group"]


def test_an_idle_connection_is_given_up_before_the_server_does(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server.answers["GET /model_info"] = (200, {"weight_version": "1"})
    assert engine_module._KEEPALIVE_S < SERVERS_KEEPALIVE_S
    for keepalive_s, connections in ((60.0, 1), (0.0, 3)):
        server.clients.clear()
        monkeypatch.setattr(engine_module, "_KEEPALIVE_S", keepalive_s)
        engine = SGLangEngine(EngineSpec(0, "127.0.0.1", server.port, [], {}, tmp_path / "log"))
        assert [engine.weight_version() for _ in range(3)] == ["1"] * 3
        assert len(server.clients) == connections


def test_threads_share_no_connection(engine: SGLangEngine, server: Server):
    server.answers["GET /health"] = (200, {})
    with ThreadPoolExecutor(1) as pool:
        assert [engine.health(), engine.health(), pool.submit(engine.health).result()] == [True] * 3
    assert len(server.clients) == 2


def test_a_proxy_in_the_environment_is_ignored(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.answers["GET /health"] = (200, {})
    assert SGLangEngine(EngineSpec(0, "127.0.0.1", server.port, [], {}, tmp_path / "log")).health()


def test_an_ipv6_address_is_bracketed_in_the_url(tmp_path: Path):
    assert SGLangEngine(EngineSpec(0, "::1", 80, [], {}, tmp_path / "log")).url == "http://[::1]:80"


RANK = {"checksums": {"w": "1"}, "parallelism_info": [{"role": "target", "tp_rank": 3}]}
SYNC_VERBS = {
    "pause_generation": {},
    "continue_generation": {},
    "begin_weight_update": {},
    "end_weight_update": {},
    "flush_cache": {},
    "release_memory_occupation": {"tags": ("weights",)},
    "resume_memory_occupation": {"tags": ("weights",)},
    "init_weights_update_group": dict.fromkeys(
        ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"), 1
    ),
    "destroy_weights_update_group": {"group_name": "g"},
    "update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": [], "group_name": "g"},
    "update_weights_from_tensor": {"serialized_named_tensors": []},
    "update_weights_from_disk": {"model_path": "/x"},
    "rank_checksums": {},
    "reset_weights": {},
    "compare_weights": {},
}


@pytest.mark.parametrize("verb", SYNC_VERBS)
def test_every_call_of_a_weight_sync_has_the_deadline_of_the_flag(verb: str, tmp_path: Path, monkeypatch):
    seen: list[float] = []

    class Client:
        def request(self, method: str, url: str, json: Any, timeout: float) -> httpx.Response:
            seen.append(timeout)
            return httpx.Response(200, json={"ranks": [RANK]})

    engine = SGLangEngine(EngineSpec(4, "127.0.0.1", 1, [], {}, tmp_path / "log", sync_timeout_s=4321.0))
    monkeypatch.setattr(engine, "_clients", SimpleNamespace(client=Client()))
    if verb == "resume_memory_occupation":
        engine.release_memory_occupation(**SYNC_VERBS[verb])
    getattr(engine, verb)(**SYNC_VERBS[verb])
    assert set(seen) == {4321.0}


@pytest.mark.parametrize(
    "answer", [{}, {"ranks": []}, {"ranks": [{}]}, {"ranks": {}}, {"ranks": [RANK | {"checksums": 1}]}]
)
def test_checksums_that_are_not_in_the_answer_are_an_error_that_quotes_it(
    engine: SGLangEngine, server: Server, answer: dict[str, Any]
):
    server.answers["POST /weights_checker"] = (200, {"ranks": [RANK]})
    assert engine.rank_checksums() == [(3, {"w": "1"})]
    server.answers["POST /weights_checker"] = (200, answer)
    with pytest.raises(EngineError, match=r"engine 4 .*no ('ranks'|checksums) in "):
        engine.rank_checksums()
