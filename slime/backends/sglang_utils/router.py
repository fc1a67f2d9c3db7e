"""The router in front of the engines: a guarded sglang-router process, or an existing router.

``python -m slime.backends.sglang_utils.router`` runs sglang-router without SGLang. The router's own launcher imports
SGLang, which takes ten seconds and a gigabyte. Takes the ``--router-*`` flags of the router's parser, some with other
defaults.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from slime.backends.sglang_utils.option_table import EXTRA_POLICIES, ROUTER_DEFAULTS
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import ConfigError, EngineError, ProcessDied
from slime.utils.net import claim_ports, is_port_free, url_host
from slime.utils.process import GuardedProcess, log_tail, watch_owner

_START_TIMEOUT_S = 300.0
_EXISTING_TIMEOUT_S = 30.0
_CONTROL_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 2.0


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/liveness", timeout=_ANSWER_TIMEOUT_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def registered_workers(router_url: str) -> list[str]:
    """Urls of the engines of a router. Raises EngineError if it does not answer."""
    try:
        reply = httpx.get(f"{router_url}/workers", timeout=_CONTROL_TIMEOUT_S, trust_env=False).raise_for_status()
        return [worker["url"].rstrip("/") for worker in reply.json().get("workers", [])]
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(
            f"the router at {router_url} does not list engines: {type(error).__name__}: {error}"
        ) from error


def remove_worker(router_url: str, worker_url: str) -> None:
    """Remove the engine at ``worker_url``, alive or dead, from a router. Succeeds for an unknown engine.

    Raises:
        EngineError: the router did not answer, or refused.
    """
    try:
        with httpx.Client(base_url=router_url, timeout=_CONTROL_TIMEOUT_S, trust_env=False) as client:
            for worker in client.get("/workers").raise_for_status().json().get("workers", []):
                if worker["url"] == worker_url:  # the route takes the router's id of a worker, not its url
                    client.delete(f"/workers/{worker['id']}").raise_for_status()
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(
            f"the router at {router_url} was to forget {worker_url}: {type(error).__name__}: {error}"
        ) from error


class RouterProcess:
    """A router of this run. Ends with this process."""

    is_ours = True

    def __init__(
        self,
        host: str,
        port: int | None,
        *,
        request_timeout_s: int,
        log_path: Path,
        flags: Sequence[str] = (),
        has_pd: bool = False,
    ) -> None:
        """
        Args:
            host: address to bind to.
            port: None takes any free one.
            flags: ``--router-*`` flags of the router's own parser.
            has_pd: the router sends every request to a prefill and a decode engine.

        Raises:
            ConfigError: the port is in use.
        """
        if port is not None and not is_port_free(host, port):
            raise ConfigError(
                f"--sglang-router-port {port} is in use on {host}. Stop what listens there, leave the flag out to get "
                "a free port, or name the router that listens there with --sglang-router-ip as well."
            )
        # Held while the router lives: it binds seconds later. The second port is for its metrics, on loopback.
        self._claims = [claim_ports(host), claim_ports("127.0.0.1")]
        self.host, self.port = host, self._claims[0].first if port is None else port
        argv = [sys.executable, "-m", "slime.backends.sglang_utils.router", "--host", host.strip("[]")]
        argv += ["--port", str(self.port), "--prometheus-port", str(self._claims[1].first)]
        argv += ["--request-timeout-secs", str(request_timeout_s), *flags]
        argv += ["--router-pd-disaggregation"] if has_pd else []
        self._process = GuardedProcess(argv, log_path=log_path)

    @property
    def url(self) -> str:
        return f"http://{url_host(self.host)}:{self.port}"

    def wait_ready(self) -> None:
        wait_until(
            self._answers, Deadline(_START_TIMEOUT_S, f"the router at {self.url}", f"See {self._process.log_path}")
        )

    def _answers(self) -> bool:
        self.raise_if_dead()
        return _is_alive(self.url)

    def raise_if_dead(self) -> None:
        if self._process.exit_code() is not None:
            raise ProcessDied(
                f"the router at {self.url} ended with status {self._process.exit_code()}. Last lines of "
                f"{self._process.log_path}:\n{log_tail(self._process.log_path)}"
            )

    def stop(self) -> None:
        self._process.stop()
        for claim in self._claims:
            claim.release()


class ExistingRouter:
    """The router that ``--sglang-router-ip`` and ``--sglang-router-port`` name. Never stopped here."""

    is_ours = False  # other runs may use it: engines must be removed one by one before they stop

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    @property
    def url(self) -> str:
        return f"http://{url_host(self.host)}:{self.port}"

    def wait_ready(self) -> None:
        fix = "Start it first, or leave --sglang-router-ip and --sglang-router-port out to get a router of this run"
        what = f"the existing router at {self.url}"
        wait_until(lambda: _is_alive(self.url), Deadline(_EXISTING_TIMEOUT_S, what, fix))

    def raise_if_dead(self) -> None:
        if not _is_alive(self.url):
            raise EngineError(f"the existing router at {self.url} (--sglang-router-ip) does not answer any more.")

    def stop(self) -> None:
        """Do nothing: other runs may use the router."""


Router: TypeAlias = RouterProcess | ExistingRouter


def router_args(argv: Sequence[str] | None = None) -> Any:
    """``sglang_router.router_args.RouterArgs`` of a command line."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(description="Run the router until the process that started it ends.")
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prometheus-port", type=int, required=True)
    parser.add_argument("--request-timeout-secs", type=int, required=True)
    for action in parser._actions:
        if action.dest in EXTRA_POLICIES and action.choices is not None:
            action.choices = [*action.choices, *EXTRA_POLICIES[action.dest]]
    # slime's request timeout and a port on loopback, unless the user gave other values
    parser.set_defaults(
        router_request_timeout_secs=None, router_prometheus_port=None, router_prometheus_host="127.0.0.1"
    )
    parser.set_defaults(**ROUTER_DEFAULTS)
    options = parser.parse_args(argv)
    if options.router_request_timeout_secs is None:
        options.router_request_timeout_secs = options.request_timeout_secs
    if options.router_prometheus_port is None:
        options.router_prometheus_port = options.prometheus_port
    # slime watches the engines itself: a router that drops a paused or busy engine loses its requests
    options.router_disable_circuit_breaker = True
    options.router_disable_health_check = True
    return RouterArgs.from_cli_args(options, use_router_prefix=True)


def main() -> None:
    watch_owner(in_child=True)  # the router's native main loop keeps the interpreter's lock
    _forget_proxies()
    args = router_args()
    from sglang_router.router import Router

    Router.from_args(args).start()


def _forget_proxies() -> None:
    """Unset the proxy variables."""
    # The router ignores NO_PROXY and would send requests to engines through the proxy.
    for name in list(os.environ):
        if name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            del os.environ[name]


if __name__ == "__main__":
    main()
