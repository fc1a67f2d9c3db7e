"""Addresses and ports of this host."""

from __future__ import annotations

import socket

from slime.utils.errors import SlimeError

FIRST_SERVICE_PORT = 15000
"""Services of slime listen from here upward: above Ray's own ports, below those that the kernel hands out."""
_LAST_PORT = 32000
WEIGHT_INTERFACES = "SLIME_WEIGHT_INTERFACES"
"""Environment variable of trainer and engines: ``GLOO_SOCKET_IFNAME`` of the group in which weights travel. Gloo makes
a connection, and a thread to serve it, for each name; all members of a group must have as many."""
WEIGHT_LOOPBACK = "lo,lo,lo"
"""Its value where everything is on one host: a broadcast over one connection keeps one core at each end busy."""


class PortClaim:
    """Consecutive ports that no other claim on this host holds, until it is released or this process ends.

    A probe alone is not enough: engines start side by side and bind seconds after they chose. The claim is a name in
    the kernel's abstract socket namespace, per port: exclusive, and gone with the process that holds it.
    """

    def __init__(self, first: int, names: list[socket.socket]) -> None:
        self.first = first
        self._names = names

    def release(self) -> None:
        for name in self._names:
            name.close()
        self._names = []


def claim_ports(host: str, count: int = 1, *, start: int = FIRST_SERVICE_PORT) -> PortClaim:
    """The first ``count`` consecutive ports from ``start`` upward that are free on ``host`` and not claimed.

    Raises:
        SlimeError: there are none.
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
        port += len(names) + 1
    raise SlimeError(f"no {count} consecutive free ports from {start} to {_LAST_PORT} on {host}. See ss -ltnp.")


def _claim(port: int) -> socket.socket | None:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0slime-port-{port}")
    except OSError:
        name.close()
        return None
    return name


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on right now. Bind it soon: nothing reserves it."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((_bare(host), 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(host: str, port: int) -> bool:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_bare(host), port))
        except OSError:
            return False
    return True


def url_host(host: str) -> str:
    """``host`` as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _bare(host: str) -> str:
    return host.strip("[]")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
