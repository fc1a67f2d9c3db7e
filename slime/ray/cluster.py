"""The Ray cluster of a run: joins the one it is given, or starts one inside the driver that ends with it.

Without a GPU, Ray's "GPU" slots are logical: the embedded cluster announces as many as the run asks for, so that
placement is the same code on a laptop and on a cluster. Everything binds to loopback when the cluster is our own.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from slime.utils import accelerator
from slime.utils.reaper import start_reaper

__all__ = ["node_address", "num_slots", "running_cluster", "worker_env"]

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 512 * 1024**2
_LOOPBACK = "127.0.0.1"
_INHERITED = ("SLIME_ACCELERATOR", "SLIME_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_HUB_OFFLINE")
_DRIVER_CPUS = 4  # data buffer, rollout manager and what they start


@contextmanager
def running_cluster(args: Namespace) -> Iterator[None]:
    """Ray is up inside the block. An embedded cluster is stopped at its end, however that comes about."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=True, logging_level=logging.WARNING)
    else:
        _start_embedded(args)
    try:
        yield
    finally:
        ray.shutdown()


def _start_embedded(args: Namespace) -> None:
    """Start Ray as children of this process, and a process that ends whatever is left of them when this one is gone."""
    start_reaper()
    slots = num_slots(args)
    is_cpu = accelerator.current().is_cpu
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, slots + _DRIVER_CPUS),
        num_gpus=slots if is_cpu else None,
        object_store_memory=_OBJECT_STORE_BYTES if is_cpu else None,
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        _node_ip_address=_LOOPBACK,
    )


def node_address() -> str:
    """Address that this node's services bind to: loopback in an embedded cluster, ``SLIME_HOST_IP`` where it is set."""
    return os.environ.get("SLIME_HOST_IP") or ray.util.get_node_ip_address()


def num_slots(args: Namespace) -> int:
    """Device slots of the whole run: trainer ranks and engine devices side by side."""
    train = 0 if args.debug_rollout_only else args.world_size
    return train + (0 if args.debug_train_only else args.rollout_num_gpus)


def worker_env() -> dict[str, str]:
    """Environment of every actor that slime starts.

    One OpenMP thread on a CPU: ranks and engines share the cores, and spinning OpenMP barriers of several processes
    slow each other down by orders of magnitude.
    """
    env = {"RAY_USE_UVLOOP": "0", "TOKENIZERS_PARALLELISM": "false"}
    if accelerator.current().is_cpu:
        env["OMP_NUM_THREADS"] = "1"
    if not os.environ.get("RAY_ADDRESS"):
        env |= {"SLIME_HOST_IP": _LOOPBACK, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return env | {name: os.environ[name] for name in _INHERITED if name in os.environ}
