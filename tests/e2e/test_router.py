"""The real router process."""

from __future__ import annotations

import re
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.router import ExistingRouter, RouterProcess, router_args
from slime.backends.sglang_utils.topology import WorkerType
from slime.data.dump_file import load_saved
from slime.utils.errors import ConfigError, EngineError, ProcessDied
from slime.utils.net import free_port
from tests.doc_commands import shown_flags
from tests.e2e.running import ROOT, metrics, run_train, values

FIXED = ["--host", "127.0.0.1", "--port", "1", "--prometheus-port", "2", "--request-timeout-secs", "14400"]


def router(port: int | None, log: Path, *flags: str) -> RouterProcess:
    return RouterProcess("127.0.0.1", port, request_timeout_s=600, log_path=log, flags=flags)


def test_the_router_answers_and_stops_and_can_be_used_by_others_meanwhile(tmp_path: Path):
    running = router(None, tmp_path / "log", "--router-policy", "round_robin")
    other = ExistingRouter(running.host, running.port)
    try:
        running.wait_ready()
        assert httpx.get(f"{running.url}/workers").json()["workers"] == []
        other.wait_ready()
        other.stop()
        other.raise_if_dead()
        running.raise_if_dead()
    finally:
        running.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/liveness")
    with pytest.raises(EngineError, match=r"existing router at http://127.0.0.1:\d+ .* does not answer"):
        other.raise_if_dead()


def test_a_port_in_use_is_refused_by_its_flag(tmp_path: Path):
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with pytest.raises(ConfigError, match=f"--sglang-router-port {port} is in use"):
            router(port, tmp_path / "log")


def test_a_router_that_cannot_start_shows_its_last_log_lines(tmp_path: Path):
    broken = router(None, tmp_path / "log", "--router-policy", "no_such_policy")
    try:
        with pytest.raises(ProcessDied, match=r"(?s)ended with status 2.*no_such_policy"):
            broken.wait_ready()
    finally:
        broken.stop()


def test_without_flags_the_router_has_slimes_defaults_and_does_not_watch_engines():
    args = router_args(FIXED)
    assert (args.policy, args.log_level, args.balance_abs_threshold, args.balance_rel_threshold) == (
        "cache_aware",
        "warn",
        10,
        1.2,
    )
    assert (args.disable_circuit_breaker, args.disable_health_check) == (True, True)
    assert (args.prometheus_host, args.prometheus_port, args.request_timeout_secs) == ("127.0.0.1", 2, 14400)


def test_flags_reach_the_routers_own_arguments():
    flags = "--router-policy consistent_hashing --router-cache-threshold 0.5 --router-prefill http://a 9000"
    args = router_args([*FIXED, *flags.split(), "--router-request-timeout-secs", "7", "--worker-urls", "http://w"])
    assert (args.policy, args.cache_threshold, args.request_timeout_secs) == ("consistent_hashing", 0.5, 7)
    assert (args.prefill_urls, args.worker_urls) == ([("http://a", 9000)], ["http://w"])


class Worker:
    """Answers the requests that a router sends to a new worker."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = b'{"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1}'
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


def test_a_router_of_prefill_and_decode_engines_learns_which_is_which(tmp_path: Path):
    running = RouterProcess("127.0.0.1", None, request_timeout_s=600, log_path=tmp_path / "log", has_pd=True)
    workers = [Worker(), Worker()]
    try:
        running.wait_ready()
        for worker, (kind, port) in zip(workers, ((WorkerType.PREFILL, 9000), (WorkerType.DECODE, None)), strict=True):
            spec = EngineSpec(
                0, "127.0.0.1", worker.port, [], {}, tmp_path / "log", worker_type=kind, bootstrap_port=port
            )
            SGLangEngine(spec).register(running.url)

        def known() -> dict[str, tuple[str, int | None]]:
            found = httpx.get(f"{running.url}/workers", trust_env=False).json()["workers"]
            return {item["url"]: (item["worker_type"], item.get("bootstrap_port")) for item in found}

        first, second = (f"http://127.0.0.1:{worker.port}" for worker in workers)
        assert known() == {first: ("prefill", 9000), second: ("decode", None)}
    finally:
        running.stop()
        for worker in workers:
            worker.http.shutdown()
            worker.http.server_close()


def test_engines_without_a_trainer_use_the_router_that_is_given_and_leave_it_as_it_was(tiny_task, tmp_path: Path):
    engines = tmp_path / "engines.yaml"
    engines.write_text(
        "sglang: [{name: actor, server_groups: "
        "[{worker_type: regular, num_gpus: 2, overrides: {context_length: 96, max_total_tokens: 8192}}]}]"
    )
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    existing = router(None, tmp_path / "log", "--router-policy", "round_robin")
    flags = [
        *shown_flags("docs/en/get_started/quick_start.md", "--debug-rollout-only"),
        *("--hf-checkpoint", tiny_task.model, "--prompt-data", tiny_task.train, "--fp32", "--rollout-batch-size", 4),
        *("--rollout-num-gpus", 2, "--sglang-config", engines, "--output-dir", tmp_path, "--experiment-name", "run"),
        *("--sglang-router-ip", existing.host, "--sglang-router-port", existing.port, "--sglang-context-length", 128),
        *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"),
    ]
    try:
        existing.wait_ready()
        result = run_train(flags, tmp_path)
        assert result.status == 0, result.output[-4000:]
        assert httpx.get(f"{existing.url}/workers").json()["workers"] == []
        existing.raise_if_dead()
    finally:
        existing.stop()
    assert re.search(rf"router {existing.url}, engines (http://127.0.0.1:\d+(, )?){{2}}", result.output), result.output
    assert result.survivors() == []
    samples = load_saved(tmp_path / "0.pt")["samples"]
    assert len(samples) == 16
    assert all(sample["response_length"] > 0 for sample in samples)
    assert len(values(metrics(tmp_path / "run"), "rollout/raw_reward")) == 1
