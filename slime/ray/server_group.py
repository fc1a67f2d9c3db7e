"""The engines of a run and the router in front of them: started side by side, watched, and stopped together.

Owned by the rollout manager. On a CPU the manager also owns the process that SGLang is preloaded in; engines on other
nodes, and engines on GPUs, start SGLang themselves.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import ray

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.sglang_utils.router import Router
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.observability.logging_utils import configure_logger
from slime.observability.tracking import run_directory
from slime.ray.actor_group import NOSET_VISIBLE_DEVICES
from slime.ray.cluster import node_address, worker_env
from slime.ray.fleet import RayEngineFleet
from slime.ray.placement_group import GpuSlots
from slime.ray.waiting import get
from slime.utils import accelerator
from slime.utils.net import free_port

__all__ = ["EngineActor", "RolloutServer"]

logger = logging.getLogger(__name__)

_ENGINE_THREADS = 4
_STOP_TIMEOUT_S = 15.0


class EngineActor(SGLangEngine):
    """Body of the actor: an engine that picks address and ports on the node where it runs."""

    def __init__(self, args: Namespace, rank: int, base_gpu_id: int, fork_server_socket: str | None) -> None:
        configure_logger(f" engine-{rank}")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        host = node_address()
        port, nccl_port = free_port(host), free_port(host)
        argv = build_argv(
            args,
            rank=rank,
            host=host,
            port=port,
            nccl_port=nccl_port,
            base_gpu_id=base_gpu_id,
            tp_size=args.rollout_num_gpus_per_engine,
        )
        is_local = fork_server_socket is not None and Path(fork_server_socket).parent.exists()
        super().__init__(
            EngineSpec(
                rank=rank,
                host=host,
                port=port,
                argv=argv,
                env=server_env(),
                log_path=_log_directory(args) / f"engine_{rank}.log",
                start_timeout_s=args.engine_start_timeout,
                fork_server_socket=fork_server_socket if is_local else None,
                num_gpus=args.rollout_num_gpus_per_engine,
            )
        )

    def start_and_register(self, router_url: str) -> EngineInfo:
        self.start()
        self.register(router_url)
        return EngineInfo(self.url, self._spec.num_gpus)


class RolloutServer:
    """Router and engines of one model. The constructor returns at once; :meth:`wait_ready` waits."""

    def __init__(self, args: Namespace, slots: GpuSlots) -> None:
        self._args = args
        logs = _log_directory(args)
        host = args.sglang_router_ip or node_address()
        self._router = Router(
            host,
            args.sglang_router_port,
            policy=args.router_policy,
            request_timeout_s=args.sglang_router_request_timeout_secs,
            log_path=logs / "router.log",
        )
        is_cpu = accelerator.current().is_cpu
        self._fork_server = ForkServer(logs / "fork_server.log", server_env()) if is_cpu else None
        size = args.rollout_num_gpus_per_engine
        actor = ray.remote(EngineActor)
        socket = None if self._fork_server is None else self._fork_server.socket_path
        self._handles = [
            actor.options(
                num_cpus=0.2,
                num_gpus=0.2,
                max_concurrency=_ENGINE_THREADS,
                scheduling_strategy=slots.strategy(rank * size),
                runtime_env={"env_vars": worker_env() | NOSET_VISIBLE_DEVICES},
            ).remote(args, rank, slots.device_ids[rank * size], socket)
            for rank in range(len(slots) // size)
        ]
        self._starting = [handle.start_and_register.remote(self._router.url) for handle in self._handles]
        self._fleet: RayEngineFleet | None = None

    @property
    def fleet(self) -> RayEngineFleet:
        assert self._fleet is not None, "wait_ready() comes first"
        return self._fleet

    def wait_ready(self) -> tuple[str, int]:
        """(host, port) of the router once every engine is registered with it."""
        self._router.wait_ready()
        try:
            infos = get(
                self._starting, self._args.engine_start_timeout + 60.0, f"{len(self._handles)} engines to start"
            )
        except Exception:
            if self._fork_server is not None:
                self._fork_server.raise_if_dead()  # then that is the cause
            raise
        self._fleet = RayEngineFleet(tuple(self._handles), tuple(infos))
        logger.info("router %s, engines %s", self._router.url, ", ".join(info.url for info in infos))
        return self._router.host, self._router.port

    def raise_if_dead(self) -> None:
        """Raise the cause if the router or an engine has died."""
        self._router.raise_if_dead()
        calls: list[Any] = [handle.raise_if_dead.remote() for handle in self._handles]
        get(calls, _STOP_TIMEOUT_S, "engines to say whether they live")

    def stop(self) -> None:
        """Stop engines, router and the preloading process."""
        try:
            get([handle.stop.remote() for handle in self._handles], _STOP_TIMEOUT_S, "engines to stop")
        except Exception as error:  # killing the actor kills its server as well
            logger.warning("an engine did not stop by itself: %s", error)
        for handle in self._handles:
            ray.kill(handle)
        self._router.stop()
        if self._fork_server is not None:
            self._fork_server.stop()


def _log_directory(args: Namespace) -> Path:
    return run_directory(args, args.experiment_name) / "engines"
