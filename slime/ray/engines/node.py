"""The parts of an engine on other nodes than its first: an actor on each node, and what the engine knows of it.

The engine's own actor makes these actors, so they end with it, whatever ends it. No request and no weight sync goes
to them: SGLang passes on what the engine's first node is told. Only files are the business of every node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from slime.backends.sglang_utils.fork_server import ForkedServer
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.sglang_utils.server_process import ForkAddress, launch_server, named_children
from slime.backends.sglang_utils.topology import EnginePlace
from slime.observability.logging_utils import configure_logger
from slime.ray.run.cluster import NOSET_VISIBLE_DEVICES, node_address, worker_env
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.process_info import introduce
from slime.ray.watch.waiting import get
from slime.utils import accelerator
from slime.utils.async_utils import call_in_thread, run
from slime.utils.deadline import Deadline
from slime.utils.errors import DeadlineExceeded
from slime.utils.net import claim_ports
from slime.utils.process import GuardedProcess, has_ended, log_tail

__all__ = ["EngineNodeActor", "NodeSlot", "RayOtherNode", "pull_in_time"]

logger = logging.getLogger(__name__)

_THREADS = 2
"""One may copy files while the other says that it lives."""
_LOOK_EVERY_S = 0.5
_LOOK_TIMEOUT_S = 5.0
_MOST_SILENT = 6
"""Looks without an answer after which a node is lost. Before it has started it may be busy with that."""
_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class NodeSlot:
    """Where a part of an engine goes.

    Attributes:
        strategy: pins an actor to the part's first device slot.
        base_gpu_id: number of that device on its node, as Ray counts.
    """

    strategy: Any
    base_gpu_id: int


class EngineNodeActor:
    """Body of the actor.

    Args:
        node: which of the engine's nodes this is, from 1.
        dist_init_addr: where the engine's processes meet.
        bootstrap_port: of prefill engines.
        fork_server: where a preloading process may be used, if that is on this host.
        log_path: of the server.
    """

    def __init__(
        self,
        args: Namespace,
        place: EnginePlace,
        node: int,
        base_gpu_id: int,
        dist_init_addr: str,
        bootstrap_port: int | None,
        fork_server: ForkAddress | None,
        log_path: Path,
    ) -> None:
        self._name = f"engine {place.rank} node {node}"
        configure_logger(f" engine-{place.rank}.{node}")
        introduce(self._name)
        self._host = host = node_address()
        self._ports = [claim_ports(host, 1), claim_ports(host, 1)]
        port, nccl_port = (claim.first for claim in self._ports)
        self._argv = build_argv(
            args,
            rank=place.rank,
            host=host,
            port=port,
            nccl_port=nccl_port,
            base_gpu_id=accelerator.resolve_visible_device_id(base_gpu_id),
            tp_size=place.num_tensor_ranks(args),
            dist_init_addr=dist_init_addr,
            overrides=place.overrides,
            worker_type=place.worker_type,
            bootstrap_port=bootstrap_port,
            num_nodes=place.num_nodes(args.num_gpus_per_node),
            node_rank=node,
        )
        self._fork_server_socket = None if fork_server is None else fork_server.socket_on(host)
        self._log_path = log_path
        self._pull_timeout_s = args.weight_sync_timeout
        self._deadline = Deadline(args.engine_start_timeout, f"{self._name} to start", "--engine-start-timeout")
        self._server: ForkedServer | GuardedProcess | None = None
        self._parts: dict[str, psutil.Process] = {}

    def start(self) -> None:
        self._server = launch_server(
            self._argv,
            env=server_env(self._host),
            log_path=self._log_path,
            fork_server_socket=self._fork_server_socket,
            deadline=self._deadline,
        )

    def note_parts(self) -> None:
        """The engine answers, so every process of the server is there. SGLang waits for them one after the other on
        this node, and would not notice the end of the second while the first one lives."""
        if self._server is not None:
            self._parts = named_children(self._server.pid)

    def lost(self) -> str | None:
        """Why the server, or a process of it, has ended; None while it runs, or has not been started."""
        status = None if self._server is None else self._server.exit_code()
        part = next((name for name, part in self._parts.items() if has_ended(part)), None)
        if status is None and part is None:
            return None
        how = f"died with status {status}" if part is None else f"lost its process {part}"
        return f"{self._name} {how}. Last lines of {self._log_path}:\n{log_tail(self._log_path)}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def pull_weights(self, source_dir: str, local_dir: str, version: int) -> None:
        """Bring this node's copy of the weights in ``local_dir`` up to ``version``."""
        pull_in_time(self._name, source_dir, local_dir, version, self._pull_timeout_s)


def pull_in_time(who: str, source_dir: str, local_dir: str, version: int, timeout_s: float) -> None:
    """Bring the copy of the weights in ``local_dir`` up to ``version``, in a thread: a file system that hangs does not
    end with the wait for it.

    Raises:
        DeadlineExceeded: it takes longer than ``timeout_s``.
    """
    from slime.weight_sync.local_checkpoint import pull

    async def wait() -> None:
        async with asyncio.timeout(timeout_s):
            await call_in_thread(pull, Path(source_dir), Path(local_dir), version, timeout_s=timeout_s)

    what = f"{who} to bring its weights in {local_dir} to version {version} of {source_dir}"
    deadline = Deadline(timeout_s, what, "Look at both file systems, or raise --weight-sync-timeout")
    try:
        run(wait())
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise  # of a lock that another engine holds
        raise deadline.error() from None


class RayOtherNode:
    """The engine's side of one such actor, which it makes. Arguments as of :class:`EngineNodeActor`."""

    def __init__(self, slot: NodeSlot, args: Namespace, place: EnginePlace, node: int, *more: Any) -> None:
        self.name = f"engine {place.rank} node {node}"
        self.handle = (
            ray.remote(EngineNodeActor)
            .options(
                num_cpus=0.2,
                num_gpus=0.2,
                max_concurrency=_THREADS,
                scheduling_strategy=slot.strategy,
                runtime_env={"env_vars": worker_env() | NOSET_VISIBLE_DEVICES},
            )
            .remote(args, place, node, slot.base_gpu_id, *more)
        )
        self._started: Any = None
        self._looked_at = float("-inf")
        self._num_silent = 0

    def start(self) -> None:
        self._started = self.handle.start.remote()

    def note_parts(self) -> None:
        self.handle.note_parts.remote()

    def lost(self) -> str | None:
        """Asked at most twice a second: those who watch ask more often."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        call = self.handle.lost.remote()
        ready = ray.wait([self._started, call], num_returns=2, timeout=_LOOK_TIMEOUT_S)[0]
        self._num_silent = 0 if call in ready else self._num_silent + 1
        if self._num_silent == _MOST_SILENT:
            return f"{self.name} has not answered for {_MOST_SILENT * _LOOK_TIMEOUT_S:g} s"
        try:
            if self._started in ready:
                ray.get(self._started)
            return ray.get(call) if call in ready else None
        except Exception as error:
            return f"{self.name} is gone: {message_of(error) or f'{type(error).__name__}: {error}'}"

    def stop(self) -> None:
        try:
            get(self.handle.stop.remote(), _STOP_TIMEOUT_S, f"{self.name} to stop")
        except Exception as error:  # killing the actor kills its server as well
            logger.debug("%s", error)
        ray.kill(self.handle)
