"""Addresses and ports of this host."""

from __future__ import annotations

import socket

__all__ = ["free_port", "is_port_free"]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on right now. Bind it soon: nothing reserves it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
