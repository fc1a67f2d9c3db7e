"""Addresses and ports of this host, and functions for users' code: host name, free ports, a router."""

from __future__ import annotations

import importlib
import os
import random
import socket
from typing import Any

from slime.utils.errors import SlimeError

# Services of slime use these ports: above Ray's service ports, below the ephemeral ports of the kernel (from 32768).
FIRST_SERVICE_PORT = 15000
_LAST_PORT = 32000
# Environment variable of trainer and engines: GLOO_SOCKET_IFNAME of the process group of the weight sync. Gloo opens
# one connection with one thread per name. All members of a group must use the same number of names.
WEIGHT_INTERFACES = "SLIME_WEIGHT_INTERFACES"
# Its value for a single host: three connections, because a broadcast over one connection is limited by one core.
WEIGHT_LOOPBACK = "lo,lo,lo"


class PortClaim:
    """Claim of consecutive ports, exclusive on this host until its release or the end of this process.

    A probe for a free port is not enough: engines start in parallel and bind their ports seconds after the choice.
    """

    def __init__(self, first: int, names: list[socket.socket]) -> None:
        self.first = first
        self._names = names

    def release(self) -> None:
        for name in self._names:
            name.close()
        self._names = []


def claim_ports(host: str, count: int = 1, *, start: int = FIRST_SERVICE_PORT) -> PortClaim:
    """Claim the first ``count`` consecutive ports from ``start`` upward that are free on ``host`` and not claimed.

    Raises:
        SlimeError: no such ports exist below the limit.
    """
    port = start
    while port + count <= _LAST_PORT:
        names: list[socket.socket] = []
        for candidate in range(port, port + count):
            name = _claim(candidate) if is_port_free(host, candidate) else None
            if name is None:
                break
            names.append(name)
        if len(names) == count:
            return PortClaim(port, names)
        PortClaim(port, names).release()
        port += len(names) + 1  # continue after the port that is not free
    raise SlimeError(f"no {count} consecutive free ports from {start} to {_LAST_PORT} on {host}. See ss -ltnp.")


def _claim(port: int) -> socket.socket | None:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    # The leading \0 selects the kernel's abstract namespace: the name is exclusive and disappears with its process.
    try:
        name.bind(f"\0slime-port-{port}")
    except OSError:
        name.close()
        return None
    return name


def free_port(host: str = "127.0.0.1") -> int:
    """A port without a listener. The port is not reserved, so bind it soon.

    Below the ephemeral ports: the kernel may give one of those to a connection before it is bound.
    """
    # SystemRandom, because processes that set the same seed must not choose the same port.
    choose = random.SystemRandom()
    first = _LAST_PORT - 8000
    for _ in range(100):
        if is_port_free(host, port := choose.randrange(first, _LAST_PORT)):
            return port
    raise SlimeError(
        f"100 of the ports {first} to {_LAST_PORT} cannot be bound on {host}: is it an address of this host?"
    )


def is_port_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as servers do: ports in TIME_WAIT count as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


def url_host(host: str) -> str:
    """``host`` in the notation of a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


# ---- functions for users' code. slime itself uses those above and ``slime.utils.process``.

SLIME_HOST_IP_ENV = "SLIME_HOST_IP"
_PREFER_IPV6_ENV = "SLIME_PREFER_IPV6"
_ANY = "0.0.0.0"
_LAST_CHOICE = 60000  # at this port the search alternates +42 and -43, so it moves down by one port at a time
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
    # random: processes that start together get different ports, also with one seed
    port = base_port + random.SystemRandom().randint(100, 1000)
    for _ in range(_LAST_CHOICE):
        if is_port_available(port):
            return port
        port = port + 42 if port + 42 <= _LAST_CHOICE else port - 43
    raise SlimeError(f"no free port around {base_port}. See ss -ltnp.")


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """The first port of the first ``consecutive`` free ports in a row, from ``start_port`` on."""
    for port in range(start_port, _MAX_PORT + 2 - consecutive):
        if all(is_port_available(port + offset) for offset in range(consecutive)):
            return port
    raise SlimeError(f"no {consecutive} free ports in a row from {start_port} on. See ss -ltnp.")


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


def single_rank_environment() -> dict[str, str]:
    """Variables with which ``torch.distributed`` makes a group of this process alone."""
    # Port 0: the store binds a port that the system chooses, so no other process can take it before.
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
