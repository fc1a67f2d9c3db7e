"""The Ray cluster of a run: joins the one it is given, or starts one inside the driver that ends with it.

Without a GPU, Ray's "GPU" slots are logical: the embedded cluster announces as many as the run asks for, so that
placement is the same code on a laptop and on a cluster. When the cluster is our own, all of slime's services (engines,
routers, process groups) are on loopback; Ray's have the host's address, and ask for a token.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from slime.utils import accelerator
from slime.utils.net import WEIGHT_INTERFACES, WEIGHT_LOOPBACK
from slime.utils.reaper import start_reaper

__all__ = ["engines_take_turns", "node_address", "running_cluster", "slot_layout", "worker_env"]

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 512 * 1024**2
_LOOPBACK = "127.0.0.1"
_INHERITED = ("SLIME_ACCELERATOR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_HUB_OFFLINE")
_ONE_NODE = ("SLIME_HOST_IP",)
"""Passed on where there is one node: with several, each says it to its own processes."""
_EMBEDDED = "slime_embedded"
"""A resource that only the clusters have that :func:`running_cluster` starts."""
_DRIVER_CPUS = 4  # data buffer, rollout manager and what they start


@contextmanager
def running_cluster(args: Namespace) -> Iterator[None]:
    """Ray is up inside the block. An embedded cluster is stopped at its end, however that comes about."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of peers that fail because another process died
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
    slots, _ = slot_layout(args)
    is_cpu = accelerator.current().is_cpu
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, slots + _DRIVER_CPUS),
        num_gpus=slots if is_cpu else None,
        object_store_memory=_OBJECT_STORE_BYTES if is_cpu else None,
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        resources={_EMBEDDED: 1},
    )


def node_address() -> str:
    """Address that this node's services bind to: loopback in an embedded cluster, ``SLIME_HOST_IP`` where it is set."""
    return os.environ.get("SLIME_HOST_IP") or ray.util.get_node_ip_address()


def slot_layout(args: Namespace) -> tuple[int, int]:
    """(device slots of the whole run, the first one of the engines).

    Trainer ranks and engine devices are side by side, or share slots with ``--colocate``; engines that somebody else
    runs have none.
    """
    train = 0 if args.debug_rollout_only else args.world_size
    engines = 0 if args.debug_train_only or args.rollout_external else args.rollout_num_gpus
    return (max(train, engines), 0) if args.colocate else (train + engines, train)


def engines_take_turns(args: Namespace) -> bool:
    """Engines stand on the trainer's devices and give their memory to it."""
    return bool(args.colocate and args.offload_rollout and not args.debug_train_only)


def worker_env() -> dict[str, str]:
    """Environment of every actor that slime starts.

    One OpenMP thread on a CPU: ranks and engines share the cores, and spinning OpenMP barriers of several processes
    slow each other down by orders of magnitude.
    """
    env = {"RAY_USE_UVLOOP": "0", "TOKENIZERS_PARALLELISM": "false"}
    if accelerator.current().is_cpu:
        env["OMP_NUM_THREADS"] = "1"
    if _is_on_loopback():
        env |= {"SLIME_HOST_IP": _LOOPBACK, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        env[WEIGHT_INTERFACES] = WEIGHT_LOOPBACK
        env |= {name: os.environ[name] for name in _ONE_NODE if name in os.environ}
    return env | {name: os.environ[name] for name in _INHERITED if name in os.environ}


def _is_on_loopback() -> bool:
    """Whether the cluster is of this host alone. Asked in every process that starts others, not only in the driver.

    Its address does not say it: Ray takes the host's own for loopback.
    """
    return _EMBEDDED in ray.cluster_resources()
