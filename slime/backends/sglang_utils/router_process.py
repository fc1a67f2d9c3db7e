"""sglang-router without SGLang: ``python -m slime.backends.sglang_utils.router_process``.

The router's own launcher imports SGLang, which takes ten seconds and a gigabyte; the router needs neither. Takes the
``--router-*`` flags of the router's own parser, with slime's defaults where they differ.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from slime.backends.sglang_utils.option_table import EXTRA_POLICIES, ROUTER_DEFAULTS
from slime.utils.process import watch_owner

__all__ = ["main", "router_args"]


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
    # a request may wait as long as slime says, on an address that nobody else reaches, unless the user said otherwise
    parser.set_defaults(
        router_request_timeout_secs=None, router_prometheus_port=None, router_prometheus_host="127.0.0.1"
    )
    parser.set_defaults(**ROUTER_DEFAULTS)
    options = parser.parse_args(argv)
    if options.router_request_timeout_secs is None:
        options.router_request_timeout_secs = options.request_timeout_secs
    if options.router_prometheus_port is None:
        options.router_prometheus_port = options.prometheus_port
    # engines are watched by slime; a router that drops a paused or busy one on its own loses requests
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
    """The router would reach the engines through a proxy, NO_PROXY or not; they are on the cluster's own network."""
    for name in list(os.environ):
        if name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            del os.environ[name]


if __name__ == "__main__":
    main()
