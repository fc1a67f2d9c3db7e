"""The router in front of the engines: a guarded sglang-router process, probed until it answers."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

from slime.utils.deadline import Deadline
from slime.utils.errors import ConfigError, EngineError
from slime.utils.net import free_port, is_port_free
from slime.utils.process import GuardedProcess, log_tail

__all__ = ["Router"]

_START_TIMEOUT_S = 30.0


class Router:
    """Ends with this process."""

    def __init__(self, host: str, port: int | None, *, policy: str, request_timeout_s: int, log_path: Path) -> None:
        if port is not None and not is_port_free(host, port):
            raise ConfigError(
                f"--sglang-router-port {port} is in use on {host}. Stop what listens there, or leave the flag out "
                "to get a free port."
            )
        self.host, self.port = host, free_port(host) if port is None else port
        argv = [sys.executable, "-m", "slime.backends.sglang_utils.router_process", "--host", host]
        argv += ["--port", str(self.port), "--prometheus-port", str(free_port()), "--policy", policy]
        argv += ["--request-timeout-secs", str(request_timeout_s)]
        self._process = GuardedProcess(argv, log_path=log_path)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_ready(self) -> None:
        """Return when the router answers."""
        deadline = Deadline(_START_TIMEOUT_S, f"the router at {self.url}")
        while not self._answers():
            self.raise_if_dead()
            deadline.check(f"Last lines of {self._process.log_path}:\n{log_tail(self._process.log_path)}")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/liveness", timeout=1.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def raise_if_dead(self) -> None:
        if self._process.exit_code() is not None:
            raise EngineError(
                f"the router at {self.url} ended with status {self._process.exit_code()}. Last lines of "
                f"{self._process.log_path}:\n{log_tail(self._process.log_path)}"
            )

    def stop(self) -> None:
        self._process.stop()
