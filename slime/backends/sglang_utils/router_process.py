"""sglang-router without SGLang: ``python -m slime.backends.sglang_utils.router_process``.

The router's own launcher imports SGLang, which takes ten seconds and a gigabyte; the router needs neither.
"""

from __future__ import annotations

import argparse
import os

from slime.utils.process import watch_owner

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the router until the process that started it ends.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prometheus-port", type=int, required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--request-timeout-secs", type=int, required=True)
    options = parser.parse_args()
    watch_owner(in_child=True)  # the router's native main loop keeps the interpreter's lock
    _forget_proxies()
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    args = RouterArgs(
        host=options.host,
        port=options.port,
        policy=options.policy,
        request_timeout_secs=options.request_timeout_secs,
        prometheus_host="127.0.0.1",
        prometheus_port=options.prometheus_port,
        disable_circuit_breaker=True,
        balance_abs_threshold=10,
        balance_rel_threshold=1.2,
        log_level="warn",
    )
    Router.from_args(args).start()


def _forget_proxies() -> None:
    """The router would reach the engines through a proxy, NO_PROXY or not; they are on the cluster's own network."""
    for name in list(os.environ):
        if name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            del os.environ[name]


if __name__ == "__main__":
    main()
