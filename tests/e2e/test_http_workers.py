"""``--use-distributed-post`` with real actors: who posts, and the results of errors, deaths and cancelled requests."""

from __future__ import annotations

import asyncio
import base64
import threading
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from slime.config.groups import RunConfig
from slime.data.sample import Sample
from slime.ray.engines.http_workers import HttpWorkers, start_http_workers
from slime.utils import http_utils
from slime.utils.errors import DeadlineExceeded, EngineError, RequestRefused
from tests.unit.rollout.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, simulated on this host."""
    node = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def workers(cluster) -> Any:
    """Started once, because a worker takes seconds. The last test kills them."""
    args = Namespace(
        num_gpus_per_node=8,
        rollout_num_gpus=2,
        rollout_num_gpus_per_engine=1,
        sglang_server_concurrency=64,
        rollout_request_timeout=None,
    )
    workers = start_http_workers(RunConfig.of(args))
    workers.wait_ready(60.0)
    try:
        yield workers
    finally:
        workers.kill()


class Server(FakeEngine):
    """Gives the status that it is asked for, or a reply that comes in pieces without an end."""

    def __init__(self) -> None:
        super().__init__(self._reply)
        self.go_on = threading.Event()

    def _reply(self, payload: dict[str, Any], number: int) -> tuple[int, Any]:
        if "experts" in payload:
            text = base64.b64encode(np.arange(payload["experts"], dtype="<i4") % 200).decode()
            return 200, {"meta_info": {"routed_experts": text}}
        return payload.get("status", 200), self._pieces() if payload.get("waits") else {"seen": payload}

    def _pieces(self) -> Iterator[bytes]:
        while not self.go_on.wait(0.05):
            yield b"piece\n"


@pytest.fixture
def server() -> Any:
    server = Server()
    try:
        yield server
    finally:
        server.go_on.set()
        server.close()


def post(url: str, payload: Any, **settings: Any) -> Any:
    async def once() -> Any:
        try:
            return await http_utils.post(url, payload, **settings)
        finally:
            await http_utils.close_http_client()

    return asyncio.run(once())


def used(workers: HttpWorkers) -> list[str]:
    """Writes down who posts."""
    names: list[str] = []
    for name, actor in list(workers._actors.items()):
        send = SimpleNamespace(remote=lambda *a, actor=actor, name=name: names.append(name) or actor.send.remote(*a))
        workers._actors[name] = SimpleNamespace(send=send)
    return names


def test_requests_are_posted_in_turn_and_their_errors_are_those_of_one_process(workers, server):
    actors = dict(workers._actors)
    names = used(workers)
    nodes = ray.get([actor.node_id.remote() for actor in actors.values()])
    assert sorted(nodes) == sorted(node["NodeID"] for node in ray.nodes()), "one on each, as it has one device slot"
    assert post(server.url, {"a": [1, 2]}) == {"seen": {"a": [1, 2]}}
    with pytest.raises(RequestRefused, match="status 400"):
        post(server.url, {"status": 400}, max_retries=5)
    with pytest.raises(EngineError, match=r"failed 2 times .* status 503"):
        post(server.url, {"status": 503}, max_retries=1)
    assert len(server.requests) == 4
    assert names == [*actors] * 2
    with pytest.raises(EngineError, match=r"ConnectError: .* \(HTTP worker 0 on "):
        post("http://127.0.0.1:9", {}, max_retries=0)
    with pytest.raises(DeadlineExceeded):
        post(server.url, {"waits": True}, timeout_s=0.3)
    workers._actors = actors


@pytest.mark.parametrize("count", [100, 2_000_000])
def test_routed_experts_arrive_and_many_of_them_as_small_integers(workers, server, count):
    meta = post(server.url, {"experts": count})["meta_info"]
    if count > 100:
        name, data = meta["routed_experts"]
        assert (name, len(data)) == ("uint8", count)
    sample = Sample(tokens=[0] * (count + 1))
    sample.append_response_tokens(SimpleNamespace(num_layers=1, moe_router_topk=1), meta_info=meta)
    assert torch.equal(sample.rollout_routed_experts.flatten(), (torch.arange(count) % 200).to(torch.uint8))


def test_a_cancelled_request_ends_at_its_worker(workers, server):
    async def give_up() -> None:
        task = asyncio.ensure_future(http_utils.post(server.url, {"waits": True}))
        while not server.requests:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(give_up(), 30))
    assert server.disconnected.wait(120), "the worker still reads the reply"


def test_dead_workers_are_skipped_and_without_any_the_process_sends_requests_itself(workers, server):
    first, second = workers.names
    ray.kill(workers._actors[first])
    assert all(post(server.url, {"n": n}) == {"seen": {"n": n}} for n in range(3))
    assert workers.names == (second,)
    ray.kill(workers._actors[second])
    assert post(server.url, {"n": 3}) == {"seen": {"n": 3}}
    assert workers.names == ()
    assert {request["n"] for request in server.requests} == {0, 1, 2, 3}, (
        "one may have come twice: who died had sent it"
    )
