"""Process groups: the default group of a trainer, and the group that it shares with inference engines.

Training backends and weight sync use this module. It does not depend on Ray or engines: callers pass addresses and
ranks.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from slime.utils import accelerator
from slime.utils.errors import ConfigError, DeadlineExceeded, kept, named

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"
_FILES_TIMEOUT_S = 7200.0
_LATE_S = 5.0


def init_default_group(backend: str, *, timeout_s: float) -> None:
    """Initialize the default group from ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``.

    Uses the device number ``LOCAL_RANK`` (set by torchrun) if the variable exists. Does nothing if the group already
    exists.

    Args:
        timeout_s: limit of the rendezvous and of every later collective.

    Raises:
        DeadlineExceeded: other ranks did not join in time.
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
        # Before the first collective with a tensor, barrier() uses the device with the number of the rank. That may be
        # a device of an engine.
        dist.all_reduce(torch.zeros(1, device=accelerator.current().device()))


def do_on_first_rank(action: Callable[[], None]) -> str | None:
    """Run ``action`` on rank 0 while the other ranks wait for its end, in :func:`files_group`. A collective.

    Returns:
        The error of ``action`` as text, on all ranks. None if it succeeded.
    """
    errors: list[Exception] = []
    if dist.get_rank() == 0:
        with kept(errors):  # without the broadcast below the other ranks would wait until their timeout
            action()
        if errors:
            logger.error("rank 0 failed", exc_info=errors[0])
    failure = [named(errors[0]) if errors else None]
    dist.broadcast_object_list(failure, src=0, group=files_group())
    return failure[0]


# The default group and its group for files. Another default group needs another one.
_files_group: tuple[ProcessGroup, ProcessGroup] | None = None


def files_group() -> ProcessGroup:
    """Gloo group of all ranks, to wait for files that a rank reads or writes. The first call is a collective.

    Its deadline is two hours. The default group's (--distributed-timeout-minutes) is for collectives of training. With
    NCCL it would end the processes of ranks that wait for a slow disk.
    """
    global _files_group
    world = dist.group.WORLD
    assert world is not None, "init_default_group() comes first"
    if _files_group is None or _files_group[0] is not world:
        timeout = timedelta(seconds=_FILES_TIMEOUT_S)
        _files_group = world, dist.new_group(backend="gloo", timeout=timeout)
    return _files_group[1]


def destroy_default_group() -> None:
    """Destroy all groups of this process and end their threads. Does nothing if there is no default group."""
    global _files_group
    if not dist.is_initialized():
        return
    _files_group = None
    dist.destroy_process_group()
    # Gloo's threads end with the last reference to their group, and garbage may still hold one. A thread that releases
    # a tensor while the interpreter shuts down aborts the process ("terminate called without an active exception").
    gc.collect()


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
    wait: Callable[[], object] = lambda: None,
) -> ProcessGroup:
    """Join a process group that is independent of the default group, as SGLang's ``init_custom_process_group`` does.

    Rank 0 hosts the store at ``master_address:master_port``. All members must call this at the same time.

    Args:
        interfaces: ``GLOO_SOCKET_IFNAME`` of this group. None: the value of the process. All members must use the same
            number of interfaces.
        wait: of rank 0: waits for the calls of the other members, in a thread. If it raises, the group is given up
            after 5 s, and the members that wait for the others fail.

    Raises:
        DeadlineExceeded: other members did not join in time.
    """
    timeout = timedelta(seconds=timeout_s)
    connect = partial(dist.TCPStore, master_address, master_port, world_size, timeout=timeout)  # type: ignore[attr-defined]

    def form() -> ProcessGroup:
        # SGLang uses the same key prefix. With another one the members would never find each other.
        store = c10d.PrefixStore(group_name, connect())
        return _new_group(store, rank, world_size, group_name, backend, timeout)

    # not the store of the group, which gloo holds while it waits: members fail when the server is gone
    server = connect(is_master=True, wait_for_workers=False) if rank == 0 else None
    with _gloo_interfaces(interfaces):
        # in threads: gloo waits five times the timeout for the connection of a member that died, and is not interrupted
        forming, waiting = in_thread(form, group_name), in_thread(wait, group_name)
        done = futures.wait((forming, waiting), return_when=futures.FIRST_EXCEPTION).done
    if not any(one.exception() for one in done):
        group: ProcessGroup = forming.result()
        _servers[group] = server
        return group
    forming.add_done_callback(_leave)
    if rank == 0:
        # late members would wait until their own deadline, and ``wait`` reports why a member refuses connections
        time.sleep(_LATE_S)
    del server  # not kept by the traceback
    if waiting.done():
        waiting.result()
    raise DeadlineExceeded(
        f"gave up after at most {timeout_s:.0f} s waiting for the {world_size} members of process group "
        f"{group_name!r} at {master_address}:{master_port}: {forming.exception()}"
    ) from forming.exception()


# The servers of the groups' stores: members may use a store as long as its group.
_servers: dict[ProcessGroup, Store | None] = {}


def _leave(late: Future[ProcessGroup]) -> None:
    """Destroy a group that was given up, if it was formed nevertheless."""
    if late.exception() is None:
        destroy_group(late.result())


def in_thread(work: Callable[[], object], name: str) -> Future[Any]:
    """Do ``work`` in a thread that does not keep the process alive."""
    outcome: Future[Any] = Future()

    def run() -> None:
        errors: list[Exception] = []
        with kept(errors):
            outcome.set_result(work())
        if errors:
            outcome.set_exception(errors[0])

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


@contextmanager
def _gloo_interfaces(names: str | None) -> Iterator[None]:
    # Torch has no parameter for the interfaces. It reads the variable when it creates a gloo group.
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
    """``torch.distributed.init_process_group`` for an additional group. A default group is not required.

    For plugins with additional processes. slime calls :func:`join_group`.

    Args:
        backend: default: the backend of the accelerator.
        init_method: address of the rendezvous, ``tcp://host:port`` or ``env://`` (the default). Excludes ``store``.
        timeout: limit of the rendezvous and of every collective. Default: half an hour, as in torch.
        group_name: equal for all members of a group, different for different groups.
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
        [],  # global ranks, empty as for a default group: torch would check them against an existing default group
        c10d.Backend(backend),
        store,
        group_name=c10d.GroupName(group_name),
        backend_options=options,
        timeout=timeout,
    )
    # collectives translate ranks with this table, which the helper does not fill
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


# None if the default group is gloo.
_gloo_group: ProcessGroup | None = None


def init_gloo_group() -> ProcessGroup:
    """Group of all ranks for tensors on the CPU: the default group if its backend is gloo. A collective."""
    global _gloo_group
    if _gloo_group is None and dist.get_backend() != "gloo":
        _gloo_group = dist.new_group(backend="gloo")
    return get_gloo_group()


def get_gloo_group() -> ProcessGroup:
    """The group of :func:`init_gloo_group`.

    Raises:
        RuntimeError: :func:`init_gloo_group` was not called. All ranks must call it first.
    """
    group = _gloo_group or (dist.group.WORLD if dist.get_backend() == "gloo" else None)
    if group is None:
        raise RuntimeError(
            "there is no gloo group yet: call init_gloo_group() on all ranks, as in --custom-megatron-init-path"
        )
    return group


def destroy_group(group: ProcessGroup) -> None:
    """Leave a group without communication: other members may already be dead.

    Drop every reference to ``group`` afterwards. The threads of the group end with the last reference, and a process
    that exits while they run may abort.
    """
    if group is dist.group.WORLD:
        dist.destroy_process_group()
        return
    if not accelerator.current().is_cpu:
        group.abort()  # drops pending NCCL operations: an orderly shutdown may wait for members that are dead
    _servers.pop(group, None)
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)
