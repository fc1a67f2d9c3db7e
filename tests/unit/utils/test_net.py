"""Ports that are chosen now and bound later."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils import net
from slime.utils.errors import SlimeError
from slime.utils.net import claim_ports, free_port, url_host

HOST = "127.0.0.1"


def test_two_claims_never_overlap_although_nothing_listens_yet():
    first, second = claim_ports(HOST, 3), claim_ports(HOST, 2)
    assert first.first >= 15000
    assert not set(range(first.first, first.first + 3)) & set(range(second.first, second.first + 2))
    first.release()
    second.release()


def test_a_released_claim_can_be_taken_again():
    claim = claim_ports(HOST, 4)
    start = claim.first
    claim.release()
    again = claim_ports(HOST, 4, start=start)
    assert again.first == start
    again.release()


def test_a_port_that_is_listened_on_is_passed_over():
    with claimed(claim_ports(HOST, 3).first) as listener:
        port = listener.getsockname()[1]
        assert claim_ports(HOST, 2, start=port - 1).first > port


def claimed(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier connection may still linger
    listener.bind((HOST, port))
    listener.listen()
    return listener


def test_a_killed_process_leaves_no_claim_behind():
    code = f"from slime.utils.net import claim_ports; c = claim_ports({HOST!r}); print(c.first, flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        port = int(holder.stdout.readline())
        other = claim_ports(HOST, start=port)
        assert other.first > port
        other.release()
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(120)
    assert claim_ports(HOST, start=port).first == port


def test_when_no_port_is_left_the_range_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(net, "_LAST_PORT", 15001)
    with pytest.raises(SlimeError, match="no 5 consecutive free ports from 15000 to 15001"):
        claim_ports(HOST, 5)


@pytest.mark.parametrize(
    ("host", "shown"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("h", "h")]
)
def test_only_an_ipv6_address_gets_brackets(host: str, shown: str):
    assert url_host(host) == shown


def test_a_free_port_is_none_that_the_kernel_gives_to_connections_and_none_of_a_process_with_the_same_seed() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = []
    for _ in range(20):
        random.seed(0)
        ports.append(free_port())
    assert len(set(ports)) > 10
    assert max(ports) < first_ephemeral
    with pytest.raises(SlimeError, match=r"192\.0\.2\.77"):
        free_port("192.0.2.77")
