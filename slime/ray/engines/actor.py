"""The parts of an engine on other nodes than its first: an actor on each node, and what the engine knows of it.

The engine's own actor makes these actors, so they end with it, whatever ends it. No request and no weight sync goes
to them: SGLang passes on what the engine's first node is told. Only files are the business of every node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo
from slime.backends.sglang_utils.fork_server import ForkedServer
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.sglang_utils.server_process import ForkAddress, launch_server, named_children
from slime.backends.sglang_utils.topology import EnginePlace, WorkerType
from slime.observability.logging_utils import configure_logger
from slime.ray.engines.preloading import engine_log_directory
from slime.ray.run.cluster import NOSET_VISIBLE_DEVICES, node_address, worker_env
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.heartbeat import register_process
from slime.ray.watch.waiting import get
from slime.utils import accelerator
from slime.utils.async_utils import call_in_thread, run
from slime.utils.deadline import Deadline
from slime.utils.errors import DeadlineExceeded
from slime.utils.net import claim_ports, url_host
from slime.utils.process import GuardedProcess, has_ended, log_tail

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
        register_process(self._name)
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


# The actors that engines are: one that starts a server on its node, one that stands for a server somebody else runs.
#
# Made by ``slime.ray.engines.servers``, called by whoever holds the handle: the rollout manager for life and death, the
# trainer for weights.

_DIST_PORTS = 30
"""Ports from its rendezvous address upward that an engine may use, on top of one per attention copy."""


class _Startable(SGLangEngine):
    """What both actors do in one call. ``_first_slot``: of the engine's devices, None where they are not ours."""

    _first_slot: int | None = None

    def start_and_register(self, router_url: str) -> EngineInfo:
        info = self.start_unregistered()
        self.register(router_url)
        return info

    def start_unregistered(self) -> EngineInfo:
        """Start, but get no requests: the weights are still those of the checkpoint."""
        self.start()
        return EngineInfo(self.url, self._spec.num_gpus, self._first_slot)


class EngineActor(_Startable):
    """Body of the actor: an engine that picks address and ports on the node where it runs."""

    def __init__(
        self,
        args: Namespace,
        place: EnginePlace,
        first_slot: int,
        base_gpu_id: int,
        fork_server: ForkAddress | None,
        num_before: int = 0,
        other_slots: Sequence[NodeSlot] = (),
    ) -> None:
        """
        Args:
            first_slot: its first device among all of the run, the trainer's first.
            base_gpu_id: number of that device on its node, as Ray counts.
            num_before: engines that died in this one's place; each has a log of its own.
            other_slots: where its parts on other nodes go.
        """
        _register_engine(place.rank)
        self._first_slot = first_slot
        self._pull_timeout_s = args.weight_sync_timeout
        host = node_address()
        is_prefill = place.worker_type is WorkerType.PREFILL
        # held as long as this actor lives, so that the next engine on this node takes others
        counts = [1, 1, _DIST_PORTS + args.sglang_dp_size, *([1] if is_prefill else [])]
        self._ports = [claim_ports(host, count) for count in counts]
        port, nccl_port, dist_port, *rest = (claim.first for claim in self._ports)
        bootstrap_port = rest[0] if rest else None
        dist_init_addr = f"{url_host(host)}:{dist_port}"
        argv = build_argv(
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
            num_nodes=1 + len(other_slots),
        )
        name = f"engine_{place.rank}.{num_before}" if num_before else f"engine_{place.rank}"
        log = engine_log_directory(args) / f"{name}.log"
        meet = (dist_init_addr, bootstrap_port, fork_server)
        self._nodes = [
            RayOtherNode(slot, args, place, node, *meet, log.with_suffix(f".node{node}.log"))
            for node, slot in enumerate(other_slots, start=1)
        ]
        spec = EngineSpec(
            rank=place.rank,
            host=host,
            port=port,
            argv=argv,
            env=server_env(host),
            log_path=log,
            start_timeout_s=args.engine_start_timeout,
            fork_server_socket=None if fork_server is None else fork_server.socket_on(host),
            num_gpus=place.num_gpus,
            worker_type=place.worker_type,
            bootstrap_port=bootstrap_port,
        )
        super().__init__(spec, self._nodes)

    def pull_weights(self, source_dir: str, local_dir: str, version: int) -> None:
        """Bring the copies of the weights in ``local_dir``, one on each of the engine's nodes, up to ``version``."""
        who, timeout_s = f"engine {self._spec.rank}", self._pull_timeout_s
        others = [node.handle.pull_weights.remote(source_dir, local_dir, version) for node in self._nodes]
        pull_in_time(who, source_dir, local_dir, version, timeout_s)
        if others:
            get(others, timeout_s, f"the other nodes of {who} to follow weight version {version}")


class ExternalEngineActor(ExternalEngine, _Startable):
    """Body of the actor that stands for a server somebody else runs."""

    def __init__(self, args: Namespace, rank: int, info: ExternalEngineInfo) -> None:
        _register_engine(rank)
        super().__init__(rank, info, args.engine_start_timeout)


def _register_engine(rank: int) -> None:
    configure_logger(f" engine-{rank}")
    register_process(f"engine {rank}")
    logging.getLogger("httpx").setLevel(logging.WARNING)
