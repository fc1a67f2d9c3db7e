"""The process group that trainer and engines share, between two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.utils import distributed_utils
from slime.utils.distributed_utils import destroy_group, get_gloo_group, init_process_group, join_group
from slime.utils.errors import DeadlineExceeded, EngineError
from slime.utils.net import free_port
from tests.limits import unloaded_time

_PEER = """
import sys, torch, torch.distributed as dist
from slime.utils import distributed_utils
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.distributed_utils import destroy_group, join_group
for name, interfaces in (("weights", None), ("weights again", "lo,lo,lo")):
    place = {"master_address": "127.0.0.1", "master_port": int(sys.argv[1]), "backend": "gloo"}
    group = join_group(**place, rank=1, world_size=2, group_name=name, timeout_s=600, interfaces=interfaces)
    received = torch.zeros(4)
    dist.broadcast(received, 0, group=group)
    assert received.tolist() == [0.0, 1.0, 2.0, 3.0]
    dist.all_reduce(received, group=group)
    destroy_group(group)
    del group
assert "sglang" not in sys.modules
"""


def test_a_group_is_joined_used_left_and_joined_again_over_more_connections_without_a_default_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = {"rank": 0, "world_size": 2, "backend": "gloo", "timeout_s": 600}
    assert not dist.is_initialized()
    port = free_port()
    root = Path(__file__).parents[2]
    peer = subprocess.Popen([sys.executable, "-c", _PEER, str(port)], cwd=root)
    try:
        for name, interfaces in (("weights", None), ("weights again", "lo,lo,lo")):
            group = join_group("127.0.0.1", port, group_name=name, interfaces=interfaces, **place)
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            sent = torch.arange(4.0)
            dist.broadcast(sent, 0, group=group)
            dist.all_reduce(sent, group=group)
            assert sent.tolist() == [0.0, 2.0, 4.0, 6.0]
            destroy_group(group)
        assert peer.wait() == 0
    finally:
        peer.kill()
        peer.wait()


def test_waiting_for_members_that_do_not_come_ends_with_an_error_that_names_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed_utils, "_LATE_S", 0.1)
    started = unloaded_time()
    with pytest.raises(DeadlineExceeded, match=r"2 members of process group 'nobody' at 127\.0\.0\.1"):
        join_group("127.0.0.1", free_port(), rank=0, world_size=2, group_name="nobody", backend="gloo", timeout_s=1.0)
    assert unloaded_time() - started < 10


_MEMBER = """
import os, sys
import torch.distributed as dist
from slime.utils import distributed_utils
class Store(dist.Store):
    def __init__(self, store):
        super().__init__()
        self._store = store
    def set(self, key, address):
        if sys.argv[3] == "dies with an address":  # a high port: the others wait for its connection
            host = address.index(bytes([127, 0, 0, 1]))
            self._store.set(key, address[:host - 2] + bytes([255, 255]) + address[host:])
        os._exit(1)
def new_group(store, rank, *rest):
    print("joined", flush=True)
    return form(Store(store) if rank == 2 else store, rank, *rest)
form, distributed_utils._new_group = distributed_utils._new_group, new_group
place = {"master_port": int(sys.argv[1]), "rank": int(sys.argv[2]), "world_size": 3, "backend": "gloo"}
distributed_utils.join_group("127.0.0.1", **place, group_name="weights", timeout_s=600)
"""


@pytest.mark.parametrize("rank_2", ["is absent", "dies", "dies with an address"])
def test_a_member_whose_call_fails_ends_the_wait_of_all_members(rank_2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_utils, "_LATE_S", 0.1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port, root = free_port(), Path(__file__).parents[2]
    start = [sys.executable, "-c", _MEMBER, str(port)]
    ranks = ["1"] if rank_2 == "is absent" else ["1", "2"]
    peers = [
        subprocess.Popen([*start, rank, rank_2], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in ranks
    ]

    form, has_begun = distributed_utils._new_group, threading.Event()

    def new_group(*args: Any) -> dist.ProcessGroup:
        has_begun.set()
        return form(*args)

    def wait() -> None:  # for the calls of ranks 1 and 2: the engine of rank 2 is dead
        assert has_begun.wait(600)
        for peer in peers:
            assert peer.stdout is not None
            assert peer.stdout.readline() == b"joined\n"
        for peer in peers[1:]:
            assert peer.wait() == 1
        raise EngineError("engine 2 died")

    monkeypatch.setattr(distributed_utils, "_new_group", new_group)
    try:
        place = {"rank": 0, "world_size": 3, "group_name": "weights", "backend": "gloo", "timeout_s": 600}
        with pytest.raises(EngineError, match="engine 2 died"):
            join_group("127.0.0.1", port, **place, wait=wait)
        if rank_2 != "dies with an address":  # for whose connection gloo waits longer, without the store
            _, errors = peers[0].communicate(timeout=600)
            assert peers[0].returncode == 1
            assert b"3 members of process group 'weights'" in errors
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


_SLOW_DISK = """
import sys, time, torch.distributed as dist
from datetime import timedelta
from slime.utils.distributed_utils import do_on_first_rank, init_default_group
rank, port = int(sys.argv[1]), sys.argv[2]
import os
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": sys.argv[1], "WORLD_SIZE": "2"}
init_default_group("gloo", timeout_s=600)
assert do_on_first_rank(lambda: None) is None
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
assert do_on_first_rank(lambda: time.sleep(3)) is None
def full():
    raise OSError("No space left")
assert do_on_first_rank(full) == "OSError: No space left"
os._exit(0)  # without a last collective, which would have a second
"""


def test_ranks_that_wait_for_a_file_have_another_deadline_than_the_collectives_of_training() -> None:
    root, port = Path(__file__).parents[2], str(free_port())
    start = [sys.executable, "-c", _SLOW_DISK]
    ranks = [subprocess.Popen([*start, str(rank), port], cwd=root) for rank in range(2)]
    try:
        assert [rank.wait() for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


_PLUGIN = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from slime.utils import distributed_utils
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.distributed_utils import destroy_group, init_process_group
where, limit = "tcp://127.0.0.1:" + sys.argv[1], timedelta(seconds=600)
group = init_process_group("gloo", where, timeout=limit, world_size=2, rank=1, group_name="plugin")
total = torch.ones(1)
dist.all_reduce(total, group=group)
assert total.item() == 3
destroy_group(group)
del group
"""


def test_a_plugin_has_a_group_of_its_own_beside_the_default_one_which_is_gloo_already() -> None:
    port = free_port()
    peer = subprocess.Popen([sys.executable, "-c", _PLUGIN, str(port)], cwd=Path(__file__).parents[2])
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert get_gloo_group() is dist.group.WORLD
        where = f"tcp://127.0.0.1:{port}"
        group = init_process_group(None, where, timedelta(seconds=600), world_size=2, rank=0, group_name="plugin")
        total = torch.full((1,), 2.0)
        dist.all_reduce(total, group=group)
        assert total.item() == 3
        destroy_group(group)
        assert peer.wait() == 0
    finally:
        dist.destroy_process_group()
        peer.kill()
        peer.wait()
