"""The actors that engines are: one that starts a server on its node, one that stands for a server somebody else runs.

Made by ``slime.ray.rollout_servers``, called by whoever holds the handle: the rollout manager for life and death, the
trainer for weights.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.sglang_utils.topology import EnginePlace, WorkerType
from slime.observability.logging_utils import configure_logger
from slime.observability.tracking import run_directory
from slime.ray.cards import introduce
from slime.ray.cluster import node_address
from slime.utils.net import claim_ports, url_host

__all__ = ["EngineActor", "ExternalEngineActor", "ForkAddress", "engine_log_directory"]

_DIST_PORTS = 30
"""Ports from its rendezvous address upward that an engine may use, on top of one per attention copy."""


@dataclass(frozen=True)
class ForkAddress:
    """Where the process that SGLang is preloaded in listens: only engines of the same node can use it."""

    host: str
    socket_path: str

    def is_on(self, host: str) -> bool:
        """Nodes with different addresses may share a file system, and nodes with the same one may not."""
        return self.host == host and Path(self.socket_path).parent.exists()


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
    ) -> None:
        """
        Args:
            first_slot: its first device among all of the run, the trainer's first.
            base_gpu_id: number of that device on its node.
            num_before: engines that died in this one's place; each has a log of its own.
        """
        _introduce_engine(place.rank)
        self._first_slot = first_slot
        host = node_address()
        is_prefill = place.worker_type is WorkerType.PREFILL
        # held as long as this actor lives, so that the next engine on this node takes others
        counts = [1, 1, _DIST_PORTS + args.sglang_dp_size, *([1] if is_prefill else [])]
        self._ports = [claim_ports(host, count) for count in counts]
        port, nccl_port, dist_port, *rest = (claim.first for claim in self._ports)
        bootstrap_port = rest[0] if rest else None
        argv = build_argv(
            args,
            rank=place.rank,
            host=host,
            port=port,
            nccl_port=nccl_port,
            base_gpu_id=base_gpu_id,
            tp_size=place.num_gpus // args.sglang_pp_size,
            dist_init_addr=f"{url_host(host)}:{dist_port}",
            overrides=place.overrides,
            worker_type=place.worker_type,
            bootstrap_port=bootstrap_port,
        )
        socket_path = fork_server.socket_path if fork_server is not None and fork_server.is_on(host) else None
        name = f"engine_{place.rank}.{num_before}.log" if num_before else f"engine_{place.rank}.log"
        super().__init__(
            EngineSpec(
                rank=place.rank,
                host=host,
                port=port,
                argv=argv,
                env=server_env(),
                log_path=engine_log_directory(args) / name,
                start_timeout_s=args.engine_start_timeout,
                fork_server_socket=socket_path,
                num_gpus=place.num_gpus,
                worker_type=place.worker_type,
                bootstrap_port=bootstrap_port,
            )
        )

    def pull_weights(self, source_dir: str, local_dir: str, version: int) -> None:
        """Bring this node's copy of the weights in ``local_dir`` up to ``version``."""
        from slime.weight_sync.local_checkpoint import pull

        pull(Path(source_dir), Path(local_dir), version)


class ExternalEngineActor(ExternalEngine, _Startable):
    """Body of the actor that stands for a server somebody else runs."""

    def __init__(self, args: Namespace, rank: int, info: ExternalEngineInfo) -> None:
        _introduce_engine(rank)
        super().__init__(rank, info, args.engine_start_timeout)


def _introduce_engine(rank: int) -> None:
    configure_logger(f" engine-{rank}")
    introduce(f"engine {rank}")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def engine_log_directory(args: Namespace) -> Path:
    """Where engines and routers write what they say."""
    return run_directory(args, args.experiment_name) / "engines"
