"""Functions for users' code: host name and address, free ports, a router, the end of a process.

slime itself uses ``slime.utils.net`` and ``slime.utils.process``.
"""

from __future__ import annotations

import importlib
import os
import random
import socket
from typing import Any

from slime.utils.errors import SlimeError
from slime.utils.net import is_port_free, url_host

SLIME_HOST_IP_ENV = "SLIME_HOST_IP"
_PREFER_IPV6_ENV = "SLIME_PREFER_IPV6"
_ANY = "0.0.0.0"
_LAST_PORT = 60000  # at this port the search alternates +42 and -43, so it moves down by one port at a time
_MAX_PORT = 65535
# connect() of a UDP socket sends nothing. The kernel only chooses the source address of the route.
_PROBES = {socket.AF_INET: "8.8.8.8", socket.AF_INET6: "2001:4860:4860::8888"}


def get_host_info() -> tuple[str, str]:
    """(host name, address): ``SLIME_HOST_IP``, else that of the route to other hosts, else the name's, else loopback.

    ``SLIME_PREFER_IPV6`` (1, true, yes, on) looks for an IPv6 address first.
    """
    name = socket.gethostname()
    if given := os.environ.get(SLIME_HOST_IP_ENV):
        return name, given
    prefers_ipv6 = os.environ.get(_PREFER_IPV6_ENV, "").lower() in ("1", "true", "yes", "on")
    families = [socket.AF_INET6, socket.AF_INET] if prefers_ipv6 else [socket.AF_INET, socket.AF_INET6]
    for family in families:
        if address := _route_address(family) or _name_address(name, family):
            return name, address
    return name, "::1" if prefers_ipv6 else "127.0.0.1"


def _route_address(family: socket.AddressFamily) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_PROBES[family], 80))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _name_address(name: str, family: socket.AddressFamily) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, family)[0][4][0])
    except OSError:
        return None


def get_current_node_ip() -> str:
    return get_host_info()[1]


def is_port_available(port: int) -> bool:
    return is_port_free(_ANY, port)


def find_available_port(base_port: int) -> int:
    """A free port above ``base_port``, not reserved."""
    port = base_port + random.randint(100, 1000)  # random: processes that start together get different ports
    for _ in range(_LAST_PORT):
        if is_port_available(port):
            return port
        port = port + 42 if port + 42 <= _LAST_PORT else port - 43
    raise SlimeError(f"no free port around {base_port}. See ss -ltnp.")


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """The first port of the first ``consecutive`` free ports in a row, from ``start_port`` on."""
    for port in range(start_port, _MAX_PORT + 2 - consecutive):
        if all(is_port_available(port + offset) for offset in range(consecutive)):
            return port
    raise SlimeError(f"no {consecutive} free ports in a row from {start_port} on. See ss -ltnp.")


def wrap_ipv6(host: str) -> str:
    """``host`` in the notation of a URL: an IPv6 address in brackets."""
    return url_host(host)


def terminate_process(process: Any, timeout: float = 1.0) -> None:
    """End a ``multiprocessing`` process: SIGTERM, then SIGKILL after ``timeout`` seconds."""
    if not process.is_alive():
        return
    process.terminate()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join(timeout)


def run_router(args: Any) -> None:
    """Serve sglang-router until this process ends. Target of a ``multiprocessing`` process.

    Args:
        args: ``sglang_router.router_args.RouterArgs``.
    """
    # by name: sglang_router is an optional dependency
    router = importlib.import_module("sglang_router.router")
    router.Router.from_args(args).start()
