"""External engines: valid addresses, their server information, and the mismatches that are refused."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from slime.backends.sglang_utils.external import (
    ExternalEngine,
    ExternalEngineInfo,
    discover_external_engines,
    normalize_external_engine_addr,
    problems_of,
)
from slime.backends.sglang_utils.rules import LIVE_STEPS
from slime.utils.errors import ConfigError, DeadlineExceeded, EngineError
from slime.utils.net import free_port

Answer = Callable[[str], tuple[int, Any]]
INFO = {"tp_size": 2, "pp_size": 1, "dtype": "bfloat16", "disaggregation_mode": "null", "random_seed": 7}


class Server:
    """Answers GET and POST with ``self.answer(path)``. Keeps the paths."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path: (200, INFO if path == "/server_info" else {})
        self.paths: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.paths.append(self.path)
                status, body = server.answer(self.path)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.mark.parametrize(
    ("addr", "url"),
    [
        ("10.0.0.1:30000", "http://10.0.0.1:30000"),
        ("http://host:1/", "http://host:1"),
        ("[::1]:30000", "http://[::1]:30000"),
        ("[::1:30000", None),
        ("https://host:1", None),
        ("host", None),
        ("::1:30000", None),
        ("host:port", None),
        ("http://host:1/v1", None),
    ],
)
def test_an_address_is_a_host_and_a_port(addr: str, url: str | None):
    if url is not None:
        assert normalize_external_engine_addr(addr) == url
        return
    with pytest.raises(ConfigError, match=r"--rollout-external-engine-addrs .* must be HOST:PORT"):
        normalize_external_engine_addr(addr)


def test_an_engine_says_what_it_is(server):
    mode = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9000, "pp_size": 2}
    server.answer = lambda path: (200, INFO | mode) if path == "/server_info" else (404, {})
    (info,) = discover_external_engines([server.url])
    assert (info.url, info.worker_type, info.num_gpus) == (server.url, "prefill", 4)
    assert (info.disaggregation_bootstrap_port, info.is_pd_worker) == (9000, True)


def test_servers_of_older_versions_are_asked_by_the_older_route(server):
    server.answer = lambda path: (200, {"tensor_parallel_size": 3}) if path == "/get_server_info" else (404, {})
    (info,) = discover_external_engines([server.url])
    assert (info.worker_type, info.num_gpus) == ("regular", 3)


def test_every_address_that_does_not_work_is_named_in_one_message(server):
    gone = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError) as caught:
        discover_external_engines([server.url, gone])
    (problem,) = caught.value.problems
    assert f"--rollout-external-engine-addrs http://{gone}: no SGLang server answers" in problem
    with pytest.raises(ConfigError) as caught:
        discover_external_engines(["nonsense", "a:1", "a:1", "b"])
    assert len(caught.value.problems) == 3


def test_the_arguments_learn_how_many_engines_and_devices_there_are(server):
    args = Namespace(rollout_external_engine_addrs=[server.url], debug_train_only=False)
    (step,) = LIVE_STEPS
    with pytest.raises(ConfigError, match="--rollout-external-engine-addrs names no engine"):
        step(Namespace(rollout_external_engine_addrs=[], debug_train_only=False))
    step(args)
    assert (args.rollout_num_engines, args.rollout_num_gpus) == (1, 2)
    assert ExternalEngineInfo.of_all(args.rollout_external_engine_infos) == discover_external_engines([server.url])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, None),
        ({"dtype": "auto"}, None),
        ({"dtype": "float32"}, "its weights are float32, the trainer's bfloat16: start it with --dtype bfloat16"),
        ({"pp_size": 2}, "it has 2 pipeline stages: SGLang confirms"),
        ({"dp_size": 2}, "--dp-size 2: one server per copy"),
        ({"dp_size": 2, "enable_dp_attention": True}, None),
        ({"encoder_only": True}, "it only encodes images"),
    ],
)
def test_what_does_not_fit_the_run_is_said_with_the_option_to_start_it_with(server, fields, message):
    server.answer = lambda path: (200, INFO | fields)
    (info,) = discover_external_engines([server.url])
    args = Namespace(use_rollout_routing_replay=False, fp32=False, fp16=False, debug_rollout_only=False)
    found = list(problems_of(info, args))
    assert all(problem.startswith(f"--rollout-external-engine-addrs {server.url}:") for problem in found)
    assert any(message in problem for problem in found) if message else found == []
    args.debug_rollout_only = True
    assert not any("stages" in problem for problem in problems_of(info, args))
    args.use_rollout_routing_replay = True
    assert any("--enable-return-routed-experts" in problem for problem in problems_of(info, args))


def test_an_engine_of_others_is_made_ready_and_never_stopped(server):
    (info,) = discover_external_engines([server.url])
    engine = ExternalEngine(3, info, 5.0)
    engine.start()
    assert "/end_weight_update" in server.paths
    assert "/continue_generation" in server.paths
    engine.stop()
    engine.raise_if_dead()
    assert engine.is_alive()
    assert engine.is_responsive(1.0)


def test_another_server_at_its_address_is_not_the_engine(server):
    (info,) = discover_external_engines([server.url])
    engine = ExternalEngine(3, info, 5.0)
    engine.start()
    server.answer = lambda path: (200, INFO | {"random_seed": 8} if path == "/server_info" else {})
    assert not engine.has_ended()
    assert not engine.is_responsive(1.0)
    with pytest.raises(EngineError, match=r"external engine 3 \(http.*\): another server runs there now"):
        engine.raise_if_dead()


def test_a_slow_server_has_not_ended_and_one_that_nobody_listens_for_has():
    with serving() as server:
        (info,) = discover_external_engines([server.url])
        engine = ExternalEngine(3, info, 5.0)
        engine.start()
        server.answer = lambda path: (503, {})
        assert not engine.has_ended()
    assert engine.has_ended()
    with pytest.raises(EngineError, match="nobody listens there any more"):
        engine.raise_if_dead()


def test_the_wait_for_an_engine_has_an_end(server):
    (info,) = discover_external_engines([server.url])
    server.answer = lambda path: (503, {})
    with pytest.raises(DeadlineExceeded, match=r"gave up after .* waiting for the external engine http.* to answer"):
        ExternalEngine(3, info, 0.1).start()
