"""The actors that engines are: one that starts a server on its node, one that stands for a server somebody else runs.

Made by ``slime.ray.engines.servers``, called by whoever holds the handle: the rollout manager for life and death, the
trainer for weights.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.sglang_utils.server_process import ForkAddress
from slime.backends.sglang_utils.topology import EnginePlace, WorkerType
from slime.observability.logging_utils import configure_logger
from slime.ray.engines.node import NodeSlot, RayOtherNode, pull_in_time
from slime.ray.engines.preloading import engine_log_directory
from slime.ray.run.cluster import node_address
from slime.ray.watch.process_info import introduce
from slime.ray.watch.waiting import get
from slime.utils import accelerator
from slime.utils.net import claim_ports, url_host

__all__ = ["EngineActor", "ExternalEngineActor"]

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
        _introduce_engine(place.rank)
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
        _introduce_engine(rank)
        super().__init__(rank, info, args.engine_start_timeout)


def _introduce_engine(rank: int) -> None:
    configure_logger(f" engine-{rank}")
    introduce(f"engine {rank}")
    logging.getLogger("httpx").setLevel(logging.WARNING)
