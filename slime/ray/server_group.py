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
from slime.backends.sglang_utils.router import ExistingRouter, Router, RouterProcess
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.sglang_utils.topology import ModelSpec, topology_of
from slime.observability.logging_utils import configure_logger
from slime.observability.tracking import run_directory
from slime.ray.actor_group import NOSET_VISIBLE_DEVICES
from slime.ray.cluster import node_address, worker_env
from slime.ray.engine_slots import EngineSlots, WaitingEngines, WatchSettings
from slime.ray.fleet import RayEngineFleet
from slime.ray.placement_group import GpuSlots
from slime.utils import accelerator
from slime.utils.errors import EngineError
from slime.utils.net import claim_ports, url_host

__all__ = ["EngineActor", "RolloutServer"]

logger = logging.getLogger(__name__)

_ENGINE_THREADS = 4
_DIST_PORTS = 30
"""Ports from its rendezvous address upward that an engine may use, on top of one per attention copy."""


class EngineActor(SGLangEngine):
    """Body of the actor: an engine that picks address and ports on the node where it runs."""

    def __init__(
        self,
        args: Namespace,
        rank: int,
        base_gpu_id: int,
        fork_server_socket: str | None,
        overrides: dict[str, Any],
        num_before: int = 0,
    ) -> None:
        """
        Args:
            num_before: engines that died in this one's place; each has a log of its own.
        """
        configure_logger(f" engine-{rank}")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        host = node_address()
        # held as long as this actor lives, so that the next engine on this node takes others
        self._ports = [claim_ports(host, count) for count in (1, 1, _DIST_PORTS + args.sglang_dp_size)]
        port, nccl_port, dist_port = (claim.first for claim in self._ports)
        argv = build_argv(
            args,
            rank=rank,
            host=host,
            port=port,
            nccl_port=nccl_port,
            base_gpu_id=base_gpu_id,
            tp_size=args.rollout_num_gpus_per_engine // args.sglang_pp_size,
            dist_init_addr=f"{url_host(host)}:{dist_port}",
            overrides=overrides,
        )
        is_local = fork_server_socket is not None and Path(fork_server_socket).parent.exists()
        super().__init__(
            EngineSpec(
                rank=rank,
                host=host,
                port=port,
                argv=argv,
                env=server_env(),
                log_path=_log_directory(args)
                / (f"engine_{rank}.{num_before}.log" if num_before else f"engine_{rank}.log"),
                start_timeout_s=args.engine_start_timeout,
                fork_server_socket=fork_server_socket if is_local else None,
                num_gpus=args.rollout_num_gpus_per_engine,
            )
        )

    def start_and_register(self, router_url: str) -> EngineInfo:
        info = self.start_unregistered()
        self.register(router_url)
        return info

    def start_unregistered(self) -> EngineInfo:
        """Start, but get no requests: the weights are still those of the checkpoint."""
        self.start()
        return EngineInfo(self.url, self._spec.num_gpus)


class RolloutServer:
    """Router and engines of one model. The constructor returns at once; :meth:`wait_ready` waits."""

    def __init__(self, args: Namespace, slots: GpuSlots) -> None:
        self._args = args
        self._gpus = slots
        self._overrides = _overrides(args, topology_of(args).models[0])
        logs = _log_directory(args)
        self._router = _router(args, logs / "router.log")
        is_cpu = accelerator.current().is_cpu
        self._fork_server = ForkServer(logs / "fork_server.log", server_env()) if is_cpu else None
        count = len(slots) // args.rollout_num_gpus_per_engine
        self._actor = ray.remote(EngineActor)
        self.engines = EngineSlots(self._start_actor, count, self._router.url)

    def _start_actor(self, rank: int, num_before: int) -> Any:
        first = rank * self._args.rollout_num_gpus_per_engine
        actor = self._actor.options(
            num_cpus=0.2,
            num_gpus=0.2,
            max_concurrency=_ENGINE_THREADS,
            scheduling_strategy=self._gpus.strategy(first),
            runtime_env={"env_vars": worker_env() | NOSET_VISIBLE_DEVICES},
        )
        device = self._gpus.device_ids[first]
        return actor.remote(self._args, rank, device, self._fork_socket(), self._overrides, num_before)

    def _fork_socket(self) -> str | None:
        """None also when the preloading process has died: engines that start later can do without it."""
        if self._fork_server is None:
            return None
        try:
            self._fork_server.raise_if_dead()
        except EngineError as error:
            logger.warning("an engine starts SGLang from scratch: %s", error)
            return None
        return self._fork_server.socket_path

    @property
    def fleet(self) -> RayEngineFleet:
        return self.engines.fleet()

    def waiting(self) -> WaitingEngines:
        """Who needs weights. Raises when router or engines cannot be kept alive."""
        if self._router.is_ours:
            self._router.raise_if_dead()
        return self.engines.waiting()

    def wait_ready(self) -> tuple[str, int]:
        """(host, port) of the router once every engine is registered with it."""
        args = self._args
        self._router.wait_ready()
        try:
            self.engines.wait_ready(args.engine_start_timeout + 60.0)
        except Exception:
            if self._fork_server is not None:
                self._fork_server.raise_if_dead()  # then that is the cause
            raise
        if args.use_fault_tolerance:
            self.engines.watch(
                WatchSettings(
                    interval_s=args.rollout_health_check_interval,
                    timeout_s=args.rollout_health_check_timeout,
                    first_wait_s=args.rollout_health_check_first_wait,
                    start_timeout_s=args.engine_start_timeout,
                )
            )
        logger.info("router %s, engines %s", self._router.url, ", ".join(e.url for e in self.fleet.engines))
        return self._router.host, self._router.port

    def raise_if_dead(self) -> None:
        """Raise the cause if the router has died, or an engine that nobody replaces."""
        self._router.raise_if_dead()
        self.engines.raise_if_dead()

    def stop(self) -> None:
        """Stop engines, router and the preloading process."""
        self.engines.stop(leaves_router=not self._router.is_ours)
        self._router.stop()
        if self._fork_server is not None:
            self._fork_server.stop()


def _router(args: Namespace, log_path: Path) -> Router:
    """The router that the command line names, or one of our own on this node."""
    if args.sglang_router_ip is not None:
        return ExistingRouter(args.sglang_router_ip, args.sglang_router_port)
    return RouterProcess(
        node_address(),
        args.sglang_router_port,
        request_timeout_s=args.sglang_router_request_timeout_secs,
        flags=args.router_argv,
        log_path=log_path,
    )


def _overrides(args: Namespace, model: ModelSpec) -> dict[str, Any]:
    """Server fields that the group of ``model`` sets: above every flag. One group is all that can be started so far."""
    found = dict(model.groups[0].overrides) if model.groups else {}
    return found if model.model_path == args.hf_checkpoint else {"model_path": model.model_path, **found}


def _log_directory(args: Namespace) -> Path:
    return run_directory(args, args.experiment_name) / "engines"
