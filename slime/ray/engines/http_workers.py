"""Requests to engines from every node (``--use-distributed-post``): actors that send for the rollout manager.

All prompts and replies of a large cluster would go through the network card of one process, and their JSON through its
interpreter. HTTP workers on every node share both: each attempt goes to the next worker.

    manager   url, retries, backoff and deadline stay with ``slime.utils.http_utils.post``
    worker    one attempt: JSON out, JSON in

A dead worker is skipped. If none is left, the manager sends the requests itself. The workers end with the manager.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
import zlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.config.arguments import ClusterArgs
from slime.config.groups import RunConfig
from slime.observability.logging_utils import configure_logger
from slime.ray.run.cluster import worker_env
from slime.ray.watch import get
from slime.ray.watch.heartbeat import register_process
from slime.rollout.direct_engines import with_packed_experts
from slime.utils import accelerator, http_utils
from slime.utils.async_utils import call_in_thread
from slime.utils.http_utils import Reply

logger = logging.getLogger(__name__)

_NUM_CPUS = 0.001  # workers wait most of the time
_MIN_CONCURRENCY = 1000  # the default of Ray for async actors
_LARGE_REPLY = 2**20  # bytes, which take milliseconds to compress or to unpack
_KILLED_GRACE_S = 5.0  # after the deadline of an attempt, for the worker to report it


class HttpWorker:
    """Body of the actor. Async, so Ray runs its calls side by side on one event loop."""

    def __init__(self, config: RunConfig, name: str) -> None:
        configure_logger(f" {name}")
        register_process(name)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        http_utils.init_http_client(config.args)

    async def node_id(self) -> str:
        """The node of the worker. The answer shows that it can send requests."""
        return str(ray.get_runtime_context().get_node_id())

    async def send(self, url: str, body: Any, headers: dict[str, str] | None, timeout_s: float) -> bytes | None:
        """One attempt, for :func:`_unpacked`. None if it took longer than ``timeout_s``."""
        try:
            reply = await http_utils.send(url, body, headers, timeout_s)
        except TimeoutError:
            return None  # an exception would be pickled with its traceback, and Ray would wrap it in its own type
        await with_packed_experts(reply.content)
        # Objects would be unpickled by Ray in threads that compete with the manager's event loop for the interpreter:
        # with 1024 tokens 1.26 ms of processor time, against 0.53 ms for bytes (benchmarks/distributed_post.py).
        data = marshal.dumps(tuple(reply))
        return await call_in_thread(_compressed, data) if len(data) > _LARGE_REPLY else _compressed(data)


def _compressed(data: bytes) -> bytes:
    """A fifth of the JSON of most replies. Of the experts of 32,000 tokens it takes 0.4 s, and they stay 15 MB."""
    return zlib.compress(data, level=1)


def _unpacked(data: bytes) -> Reply:
    # marshal is safe here: the bytes come from a worker of the same run and the same Python version
    return Reply(*marshal.loads(zlib.decompress(data)))


class HttpWorkers:
    """All workers, used in turn: a sender for :func:`slime.utils.http_utils.set_sender`.

    Args:
        actors: name -> handle.
    """

    def __init__(self, actors: dict[str, Any]) -> None:
        self._actors = actors
        self._order = list(actors)
        self._turn = 0

    @property
    def names(self) -> Sequence[str]:
        """Names of the living workers, as far as known."""
        return tuple(self._order)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every worker can send requests. From then on they send those of this process."""
        refs = [actor.node_id.remote() for actor in self._actors.values()]
        what, fix = f"{len(refs)} HTTP workers to start", "--engine-start-timeout; they need little memory each"
        get(refs, timeout_s, what, fix)
        http_utils.set_sender(self.send)

    async def send(self, url: str, body: Any, headers: dict[str, str] | None, timeout_s: float) -> Reply:
        """One attempt by the next worker, cancelled with the caller."""
        if not self._order:
            return await http_utils.send(url, body, headers, timeout_s)
        name = self._order[self._turn % len(self._order)]
        self._turn += 1
        ref = self._actors[name].send.remote(url, body, headers, timeout_s)
        try:
            async with http_utils.time_limit(timeout_s + _KILLED_GRACE_S):
                data: bytes | None = await ref
        except RayActorError as death:
            self._leave_out(name, death)
            return Reply(None, f"{name} died while it sent a request")
        except (asyncio.CancelledError, TimeoutError):
            ray.cancel(ref)  # closes the connection, which makes an engine abort the request
            raise
        if data is None:
            raise TimeoutError
        reply = await call_in_thread(_unpacked, data) if len(data) > _LARGE_REPLY else _unpacked(data)
        return reply if reply.status is not None else Reply(None, f"{reply.content} ({name})")

    def _leave_out(self, name: str, death: RayActorError) -> None:
        if name not in self._order:
            return  # another request has noticed it
        self._order.remove(name)
        rest = f"{len(self._order)} others continue" if self._order else "the rollout manager sends all requests now"
        logger.warning("%s died (%s); %s", name, str(death).partition("\n")[0], rest)

    def kill(self) -> None:
        """End all workers. Requests under way fail, and this process sends the next ones."""
        http_utils.set_sender(None)
        for actor in self._actors.values():
            ray.kill(actor)


def are_wanted(*, is_asked_for: bool, replays_experts: bool) -> bool:
    """Whether the run has workers: if asked for, and on GPUs for replies with routed experts, which have tens of MB."""
    return is_asked_for or (replays_experts and not accelerator.current().is_cpu)


def start_http_workers(config: RunConfig) -> HttpWorkers:
    """Start workers on every living node: one per device slot, at least one and at most ``--num-gpus-per-node``."""
    engines = http_utils.get_rollout_num_engines(config.args)
    concurrency = max(_MIN_CONCURRENCY, config.args.sglang_server_concurrency * engines)
    actor = ray.remote(HttpWorker)
    actors = {}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        slots = int(node["Resources"].get("GPU", 0))
        for number in range(max(1, min(config[ClusterArgs].num_gpus_per_node, slots))):
            name = f"HTTP worker {number} on {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            options = actor.options(
                num_cpus=_NUM_CPUS,
                max_concurrency=concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                runtime_env={"env_vars": worker_env()},
            )
            actors[name] = options.remote(config, name)
    logger.info("%d HTTP workers send the requests to engines", len(actors))
    return HttpWorkers(actors)
