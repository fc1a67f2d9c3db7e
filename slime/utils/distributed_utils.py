"""Process groups: the default group of a trainer, and the group it shares with inference engines.

Called by training backends and by weight sync. Knows neither Ray nor engines: addresses and ranks are handed in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from slime.utils import accelerator
from slime.utils.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"


def init_default_group(backend: str, *, timeout_s: float) -> None:
    """Initialise the default group from ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``, on the
    device number ``LOCAL_RANK``, which torchrun sets, where that is said.

    Does nothing when it already exists. ``timeout_s`` bounds the meeting and every later collective.

    Raises:
        DeadlineExceeded: the other ranks did not come.
    """
    if dist.is_initialized():
        return
    if "LOCAL_RANK" in os.environ:
        accelerator.current().set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise DeadlineExceeded(
            f"gave up after {timeout_s:.0f} s waiting for the other trainer ranks: {error}. "
            "Look for the rank that failed to start, or raise --distributed-timeout-minutes."
        ) from error
    if dist.get_backend() == "nccl":
        # until a collective has shown the device, a barrier takes the one numbered like the rank: perhaps an engine's
        dist.all_reduce(torch.zeros(1, device=accelerator.current().device()))


def do_on_first_rank(action: Callable[[], None]) -> str | None:
    """Run ``action`` on rank 0 while the others wait for its end. A collective of the default group.

    Returns:
        On all ranks what ``action`` raised there; None if it succeeded.
    """
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            logger.exception("rank 0 failed")
            failure[0] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(failure, src=0)
    return failure[0]


def join_group(
    master_address: str,
    master_port: int,
    *,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    interfaces: str | None = None,
) -> ProcessGroup:
    """Join a process group that is independent of the default group, as SGLang's ``init_custom_process_group`` does.

    Rank 0 hosts the store at ``master_address:master_port``. All members must call this at the same time. The store key
    prefix is ``group_name``, which SGLang uses as well, so that trainer and engines meet.

    Args:
        interfaces: ``GLOO_SOCKET_IFNAME`` of this group; None: that of the process. All members must name as many.

    Raises:
        DeadlineExceeded: the other members did not come.
    """
    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    try:
        store, _, _ = next(rendezvous(address, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        with _gloo_interfaces(interfaces):
            return _new_group(c10d.PrefixStore(group_name, store), rank, world_size, group_name, backend, timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise DeadlineExceeded(
            f"gave up after {timeout_s:.0f} s waiting for the {world_size} members of process group {group_name!r} at "
            f"{master_address}:{master_port}: {error}"
        ) from error


@contextmanager
def _gloo_interfaces(names: str | None) -> Iterator[None]:
    """Torch reads the variable where it makes a group, and has no other way to say it."""
    before = os.environ.get(_GLOO_INTERFACES)
    if names is not None:
        os.environ[_GLOO_INTERFACES] = names
    try:
        yield
    finally:
        if names is not None:
            del os.environ[_GLOO_INTERFACES]
            os.environ |= {} if before is None else {_GLOO_INTERFACES: before}


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str | None = None,
    pg_options: Any | None = None,
) -> ProcessGroup:
    """``torch.distributed.init_process_group`` for a group beside the default one, which need not exist.

    For plugins that talk to processes of their own; slime calls :func:`join_group`.

    Args:
        backend: that of the accelerator by default.
        init_method: where the members meet, ``tcp://host:port`` or ``env://`` (the default); or give a ``store``.
        timeout: of the meeting and of every collective; torch's default is half an hour.
        group_name: members of one group give the same, different groups different ones.
    """
    if store is not None and init_method is not None:
        raise ConfigError("init_process_group takes either init_method or store, not both.")
    timeout = timeout or c10d.default_pg_timeout
    if store is None:
        store, rank, world_size = next(rendezvous(init_method or "env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
    name = group_name or "default"
    backend = backend or accelerator.current().communication_backend
    return _new_group(c10d.PrefixStore(name, store), rank, world_size, name, backend, timeout, pg_options)


def _new_group(
    store: Store,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: timedelta,
    options: Any | None = None,
) -> ProcessGroup:
    group: ProcessGroup
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        store,
        group_name=c10d.GroupName(group_name),
        backend_options=options,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


_gloo_group: ProcessGroup | None = None
"""Beside a default group of another backend."""


def init_gloo_group() -> ProcessGroup:
    """A group of all ranks for tensors on the CPU; the default group where that is gloo. A collective."""
    global _gloo_group
    if _gloo_group is None and dist.get_backend() != "gloo":
        _gloo_group = dist.new_group(backend="gloo")
    return get_gloo_group()


def get_gloo_group() -> ProcessGroup:
    """What :func:`init_gloo_group` made.

    Raises:
        RuntimeError: it was not called; all ranks must, before the first of them asks.
    """
    group = _gloo_group or (dist.group.WORLD if dist.get_backend() == "gloo" else None)
    if group is None:
        raise RuntimeError(
            "there is no gloo group yet: call init_gloo_group() on all ranks, as in --custom-megatron-init-path"
        )
    return group


def destroy_group(group: ProcessGroup) -> None:
    """Leave a group. The other members may already be gone: nothing is exchanged.

    Drop every reference to ``group`` afterwards: its threads end with the last one, and a process that exits while they
    still run may abort.
    """
    if group is dist.group.WORLD:
        dist.destroy_process_group()
        return
    if not accelerator.current().is_cpu and hasattr(group, "abort"):
        group.abort()
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)
