"""The real router process."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from slime.backends.sglang_utils.router import Router
from slime.utils.errors import ConfigError
from slime.utils.net import free_port


def router(port: int | None, log: Path) -> Router:
    return Router("127.0.0.1", port, policy="round_robin", request_timeout_s=5, log_path=log)


def test_the_router_answers_and_stops(tmp_path: Path):
    running = router(None, tmp_path / "log")
    try:
        running.wait_ready()
        assert httpx.get(f"{running.url}/workers").json()["workers"] == []
    finally:
        running.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/liveness")


def test_a_port_in_use_is_refused_by_its_flag(tmp_path: Path):
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with pytest.raises(ConfigError, match=f"--sglang-router-port {port} is in use"):
            router(port, tmp_path / "log")
