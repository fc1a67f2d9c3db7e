"""Actors of engines: a server on one node, its parts on other nodes, and a server that others run.

``engines.servers`` makes them. The rollout manager starts and stops engines through the handles, the trainer sends
weights. An engine's actor makes the actors of its other nodes, so they end with it. Requests and weight syncs go to the
first node only, because SGLang forwards them. Weight files must reach every node.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from slime.backends import EngineInfo
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.engine_adapters import StagedAdapter
from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo, engine_info, get_server_info
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.sglang_utils.server_process import Activity, ForkAddress, NodeServer, is_shutting_down
from slime.backends.sglang_utils.topology import EnginePlace, WorkerType
from slime.observability.logging_utils import configure_logger
from slime.ray.engines.preloading import engine_log_directory
from slime.ray.run.cluster import NOSET_VISIBLE_DEVICES, node_address, worker_env
from slime.ray.watch import get
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.heartbeat import register_process
from slime.utils import accelerator
from slime.utils.async_utils import Deadline, call_in_thread, run
from slime.utils.errors import DeadlineExceeded, SlimeError
from slime.utils.net import PortClaim, claim_ports, url_host
from slime.utils.process import log_tail

logger = logging.getLogger(__name__)

_DIST_PORTS = 30  # ports from its rendezvous address upward that an engine may use, besides one per attention copy
_NODE_THREADS = 2  # one may copy files while the other answers whether the server lives
_LOOK_EVERY_S = 0.5
_SILENCE_TIMEOUT_S = 30.0  # without an answer, after its first one, a node is lost. A starting node may be busy
_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class NodeSlot:
    """Device slot of an engine's part on another node.

    Attributes:
        strategy: pins an actor to the part's first device slot.
        base_gpu_id: number of that device on its node, as Ray counts.
    """

    strategy: Any
    base_gpu_id: int


@dataclass(frozen=True)
class Rendezvous:
    """Addresses that all nodes of an engine share.

    Attributes:
        dist_init_addr: address for the rendezvous of the engine's processes.
        bootstrap_port: of prefill engines.
    """

    dist_init_addr: str
    bootstrap_port: int | None
    fork_server: ForkAddress | None


def _claim(counts: Sequence[int]) -> tuple[str, list[PortClaim]]:
    """This node's address and claims of consecutive ports. A claim reserves its ports until it is garbage-collected."""
    host = node_address()
    return host, [claim_ports(host, count) for count in counts]


@dataclass(frozen=True)
class EngineStart:
    """The start of one engine, on all of its nodes."""

    args: Namespace
    place: EnginePlace
    meet: Rendezvous

    def argv(self, base_gpu_id: int, host: str, ports: Sequence[int], node: int = 0) -> list[str]:
        """Command line of the server on node number ``node``. ``ports``: HTTP and NCCL."""
        place = self.place
        return build_argv(
            self.args,
            rank=place.rank,
            host=host,
            port=ports[0],
            nccl_port=ports[1],
            base_gpu_id=accelerator.resolve_visible_device_id(base_gpu_id),
            tp_size=place.num_tensor_ranks(self.args.sglang_pp_size),
            dist_init_addr=self.meet.dist_init_addr,
            overrides=place.overrides,
            worker_type=place.worker_type,
            bootstrap_port=self.meet.bootstrap_port,
            num_nodes=place.num_nodes(self.args.num_gpus_per_node),
            node_rank=node,
        )


def _fork_socket(fork_server: ForkAddress | None, host: str) -> str | None:
    return None if fork_server is None else fork_server.socket_on(host)


def _register(name: str, log_name: str) -> None:
    configure_logger(f" {log_name}")
    register_process(name)
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _Startable(SGLangEngine):
    """Start in one call. ``_first_slot``: of the engine's devices, None if they do not belong to the run."""

    _first_slot: int | None = None

    def start_and_register(self, router_url: str) -> EngineInfo:
        info = self.start_unregistered()
        self.register(router_url)
        return info

    def start_unregistered(self) -> EngineInfo:
        """Start without registering at the router."""
        self.start()  # no requests yet: the weights are still those of the checkpoint
        # asked of the server, which may choose another size than its flags
        answer = get_server_info(self.url) if self._spec.num_gpus > 1 else {}
        return engine_info(self.url, self._spec.num_gpus, self._first_slot, answer)

    def is_leaving(self) -> bool:
        """True if the server got SIGTERM."""
        return is_shutting_down(self._client)


class EngineActor(_Startable):
    """Body of the actor: an engine that picks address and ports on its node.

    Args:
        first_slot: its first device among all of the run, the trainer's first.
        base_gpu_id: number of that device on its node, as Ray counts.
        num_before: engines that died in this slot before. Each has a separate log.
        other_slots: device slots of its parts on other nodes.
    """

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
        _register(f"engine {place.rank}", f"engine-{place.rank}")
        self._first_slot = first_slot
        self._pull_timeout_s = args.weight_sync_timeout
        is_prefill = place.worker_type is WorkerType.PREFILL
        counts = [1, 1, _DIST_PORTS + args.sglang_dp_size, *([1] if is_prefill else [])]
        host, self._ports = _claim(counts)  # held while this actor lives: the next engine on this node takes others
        ports = [claim.first for claim in self._ports]
        meet = Rendezvous(f"{url_host(host)}:{ports[2]}", ports[3] if is_prefill else None, fork_server)
        name = f"engine_{place.rank}.{num_before}" if num_before else f"engine_{place.rank}"
        log = engine_log_directory(args) / f"{name}.log"
        start = EngineStart(args, place, meet)
        self._nodes = [
            RayOtherNode(slot, start, node, log.with_suffix(f".node{node}.log"))
            for node, slot in enumerate(other_slots, start=1)
        ]
        spec = EngineSpec(
            rank=place.rank,
            host=host,
            port=ports[0],
            argv=start.argv(base_gpu_id, host, ports),
            env=server_env(host),
            log_path=log,
            start_timeout_s=args.engine_start_timeout,
            sync_timeout_s=args.weight_sync_timeout,
            fork_server_socket=_fork_socket(fork_server, host),
            num_gpus=place.num_gpus,
            worker_type=place.worker_type,
            bootstrap_port=meet.bootstrap_port,
        )
        super().__init__(spec, self._nodes)
        self._has_notice = threading.Event()
        # A preempted node sends it to every process. Ray would end this one at once, with the server.
        signal.signal(signal.SIGTERM, lambda *_: self._has_notice.set())

    def is_leaving(self) -> bool:
        """True if this process or the server got SIGTERM."""
        return self._has_notice.is_set() or super().is_leaving()

    def pull_weights(self, source_dir: str, local_dir: str, version: int) -> None:
        """Bring the copies of the weights in ``local_dir``, one on each of the engine's nodes, up to ``version``."""
        who, timeout_s = f"engine {self._spec.rank}", self._pull_timeout_s
        others = [node.handle.pull_weights.remote(source_dir, local_dir, version) for node in self._nodes]
        pull_in_time(who, source_dir, local_dir, version, timeout_s)
        if others:
            get(others, timeout_s, f"the other nodes of {who} to follow weight version {version}")


class ExternalEngineActor(ExternalEngine, _Startable):
    """Body of the actor for a server that others run."""

    def __init__(self, rank: int, info: ExternalEngineInfo, start_timeout_s: float, sync_timeout_s: float) -> None:
        _register(f"engine {rank}", f"engine-{rank}")
        super().__init__(rank, info, start_timeout_s, sync_timeout_s)


class EngineNodeActor:
    """Body of the actor of an engine's part on another node.

    Args:
        node: number of the node within the engine, from 1.
        log_path: of the server.
    """

    def __init__(self, start: EngineStart, node: int, base_gpu_id: int, log_path: Path) -> None:
        rank, args = start.place.rank, start.args
        self._name = f"engine {rank} node {node}"
        _register(self._name, f"engine-{rank}.{node}")
        host, self._ports = _claim([1, 1])
        ports = [claim.first for claim in self._ports]
        self._server = NodeServer(
            start.argv(base_gpu_id, host, ports, node),
            env=server_env(host),
            log_path=log_path,
            fork_server_socket=_fork_socket(start.meet.fork_server, host),
        )
        self._log_path = log_path
        self._pull_timeout_s = args.weight_sync_timeout
        self._deadline = Deadline(args.engine_start_timeout, f"{self._name} to start", "--engine-start-timeout")

    def start(self) -> None:
        self._server.start(self._deadline)

    def note_parts(self) -> None:
        self._server.note_parts()

    def lost(self) -> str | None:
        """The reason why the server or one of its processes has ended. None while it runs, or before its start."""
        status, part = self._server.exit_code(), self._server.lost_part()
        if status is None and part is None:
            return None
        how = f"died with status {status}" if part is None else f"lost its process {part}"
        return f"{self._name} {how}. Last lines of {self._log_path}:\n{log_tail(self._log_path)}"

    def activity(self) -> Activity | None:
        """The work of the server so far. None before its start."""
        return self._server.activity()

    def stop(self) -> None:
        self._server.stop()

    def stage_adapter(self, tensors: bytes, metadata: Sequence[Any], num_ranks: int) -> list[str]:
        """Put an adapter into this node's memory. Returns what each of its ``num_ranks`` ranks reads."""
        self._adapter = StagedAdapter(tensors, metadata, is_shared=True)  # until the next one
        return self._adapter.texts(num_ranks)

    def pull_weights(self, source_dir: str, local_dir: str, version: int) -> None:
        """Bring this node's copy of the weights in ``local_dir`` up to ``version``."""
        pull_in_time(self._name, source_dir, local_dir, version, self._pull_timeout_s)


def pull_in_time(who: str, source_dir: str, local_dir: str, version: int, timeout_s: float) -> None:
    """Bring the copy of the weights in ``local_dir`` up to ``version``.

    Raises:
        DeadlineExceeded: it takes longer than ``timeout_s``.
    """
    from slime.weight_sync.local_checkpoint import pull

    async def wait() -> None:
        async with asyncio.timeout(timeout_s):
            # In a thread, because a call into a file system that hangs cannot be interrupted.
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
    """The engine's side of an :class:`EngineNodeActor`, which it makes."""

    def __init__(self, slot: NodeSlot, start: EngineStart, node: int, log_path: Path) -> None:
        self.name = f"engine {start.place.rank} node {node}"
        options = ray.remote(EngineNodeActor).options(
            num_cpus=0.2,
            num_gpus=0.2,
            max_concurrency=_NODE_THREADS,
            scheduling_strategy=slot.strategy,
            runtime_env={"env_vars": worker_env() | NOSET_VISIBLE_DEVICES},
        )
        self.handle = options.remote(start, node, slot.base_gpu_id, log_path)
        self._started: Any = None
        self._look: Any = None  # unanswered call of lost(), since _looked_at
        self._looked_at = float("-inf")
        self._has_answered = False
        self._work: Any = None  # unanswered call of activity()
        self._activity: Activity | None = None

    def start(self) -> None:
        self._started = self.handle.start.remote()

    def activity(self) -> Activity | None:
        """The last known :meth:`EngineNodeActor.activity`, without waiting. None before the first."""
        if self._work is None:
            self._work = self.handle.activity.remote()
        if ray.wait([self._work], timeout=0)[0]:
            with suppress(RayError):  # lost() reports it
                self._activity = ray.get(self._work)
            self._work = None
        return self._activity

    def note_parts(self) -> None:
        self.handle.note_parts.remote()

    def lost(self) -> str | None:
        """:meth:`EngineNodeActor.lost`, asked at most twice a second. Does not wait for the answer."""
        # the wait for the start of an engine calls this in every poll
        now = time.monotonic()
        if self._look is None:
            if now - self._looked_at < _LOOK_EVERY_S:
                return None
            self._looked_at, self._look = now, self.handle.lost.remote()
        look = self._look
        ready = ray.wait([self._started, look], num_returns=2, timeout=0)[0]
        try:
            if self._started in ready:  # raises the error of a start that failed
                ray.get(self._started)
            if look not in ready:
                # Before its first answer the actor imports its code, which takes minutes from a cold file system.
                is_silent = self._has_answered and now - self._looked_at > _SILENCE_TIMEOUT_S
                return f"{self.name} has not answered for {now - self._looked_at:.0f} s" if is_silent else None
            self._look = None
            lost: str | None = ray.get(look)
            self._has_answered = True
            return lost
        except Exception as error:  # Ray raises the error of the actor in its own type
            return f"{self.name} is gone: {message_of(error) or f'{type(error).__name__}: {error}'}"

    def stage_adapter(self, tensors: bytes, metadata: Sequence[Any], num_ranks: int, timeout_s: float) -> list[str]:
        ref = self.handle.stage_adapter.remote(tensors, metadata, num_ranks)
        texts: list[str] = get(ref, timeout_s, f"{self.name} to keep the adapter", "--weight-sync-timeout")
        return texts

    def stop(self) -> None:
        try:
            get(self.handle.stop.remote(), _STOP_TIMEOUT_S, f"{self.name} to stop")
        except (RayError, SlimeError) as error:  # killing the actor kills its server as well
            logger.debug("%s", error)
        ray.kill(self.handle)
