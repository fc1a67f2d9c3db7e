"""Process groups: the default group of a trainer, and the group it shares with inference engines.

Called by training backends and by weight sync. Knows neither Ray nor engines: addresses and ranks are handed in.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from slime.utils import accelerator
from slime.utils.errors import DeadlineExceeded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["destroy_group", "init_default_group", "join_group"]


def init_default_group(backend: str, *, timeout_s: float) -> None:
    """Initialise the default group from ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``.

    Does nothing when it already exists. ``timeout_s`` bounds the meeting and every later collective.

    Raises:
        DeadlineExceeded: the other ranks did not come.
    """
    if dist.is_initialized():
        return
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise DeadlineExceeded(
            f"gave up after {timeout_s:.0f} s waiting for the other trainer ranks: {error}. "
            "Look for the rank that failed to start, or raise --distributed-timeout-minutes."
        ) from error


def join_group(
    master_address: str,
    master_port: int,
    *,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
) -> ProcessGroup:
    """Join a process group that is independent of the default group, as SGLang's ``init_custom_process_group`` does.

    Rank 0 hosts the store at ``master_address:master_port``. All members must call this at the same time. The store key
    prefix is ``group_name``, which SGLang uses as well, so that trainer and engines meet.

    Raises:
        DeadlineExceeded: the other members did not come.
    """
    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    try:
        store, _, _ = next(rendezvous(address, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        group: ProcessGroup
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(group_name, store),
            group_name=c10d.GroupName(group_name),
            timeout=timeout,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise DeadlineExceeded(
            f"gave up after {timeout_s:.0f} s waiting for the {world_size} members of process group {group_name!r} at "
            f"{master_address}:{master_port}: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
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
