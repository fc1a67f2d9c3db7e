"""Addresses and ports of this host."""

from __future__ import annotations

import socket

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
    """A port without a listener. The port is not reserved, so bind it soon."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((_bare(host), 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(host: str, port: int) -> bool:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # as servers do: ports in TIME_WAIT count as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_bare(host), port))
        except OSError:
            return False
    return True


def url_host(host: str) -> str:
    """``host`` in the notation of a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _bare(host: str) -> str:
    return host.strip("[]")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
