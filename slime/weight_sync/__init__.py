"""The transports of weights from the trainer to the engines: one row per value of ``--update-weight-transport``.

To add a transport, write one file ``send_<name>.py`` with its updater, and a row here. The row also names the flags
that only this transport reads, and its rules.
Called by the rules of the command line, which import no torch, and by ``slime.ray.train_actor``.
"""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config import arguments, groups
from slime.config.arguments import SyncArgs
from slime.models.lora import LoraConfig
from slime.weight_sync.version_store import foreign_content

if TYPE_CHECKING:
    from slime.backends import WeightExporter
    from slime.weight_sync.send_disk import DiskSettings, PostWrite
    from slime.weight_sync.session import TrainerRanks
    from slime.weight_sync.updater import Updater

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class TrainerSide:
    """A trainer rank as an updater needs it.

    Attributes:
        ranks: this rank and the others.
        address: returns the address of this rank's host, where engines can reach it.
        shares_devices: engines may run on the trainer's devices (``--colocate``).
        post_write: ``--custom-update-weight-post-write-path``, called with a folder and the fleet, or None.
    """

    ranks: TrainerRanks
    address: Callable[[], str]
    shares_devices: bool = False
    post_write: Callable[[str, Any], None] | None = None


@dataclass(frozen=True)
class Transport:
    """One row of :data:`TRANSPORTS`.

    Attributes:
        make: the updater of one trainer rank. Imports the transport's module.
        reads: flags (as attributes) that no other transport reads. With the others they have no effect.
        check: yields one sentence per contradiction in the arguments of a run that uses the transport.
    """

    make: Callable[[SyncArgs, TrainerSide], Updater]
    reads: tuple[str, ...] = ()
    check: Callable[[Namespace], Iterable[str]] = lambda args: ()


def _network(sync: SyncArgs, side: TrainerSide) -> Updater:
    from slime.weight_sync.updater import WeightUpdater

    return WeightUpdater(
        side.ranks,
        address=side.address(),
        shares_devices=side.shares_devices,
        timeout_s=sync.weight_sync_timeout,
        changed_only=sync.update_weight_changed_only,
    )


def _files(sync: SyncArgs, side: TrainerSide) -> Updater:
    from slime.weight_sync.send_disk import DeltaUpdater, DiskUpdater

    settings = _disk_settings(sync, side.post_write)
    if sync.update_weight_mode == "full":
        return DiskUpdater(side.ranks, settings)
    return DeltaUpdater(side.ranks, settings, encoding=sync.update_weight_delta_encoding)


def _disk_settings(sync: SyncArgs, post_write: PostWrite | None) -> DiskSettings:
    from slime.weight_sync.send_disk import DiskSettings

    assert sync.update_weight_disk_dir is not None, "required by slime.config.check.cluster"
    local = sync.update_weight_local_checkpoint_dir
    return DiskSettings(
        root=Path(sync.update_weight_disk_dir),
        local=None if local is None else Path(local),
        keeps_files=sync.update_weight_disk_keep_files,
        checksum=sync.update_weight_delta_checksum,
        post_write=post_write,
    )


def with_adapter(
    base: Updater,
    lora: LoraConfig,
    sync: SyncArgs,
    side: TrainerSide,
    write_base: Callable[[WeightExporter, str], None],
) -> Updater:
    """An updater that sends weights with ``base``, and the adapter that engines serve.

    Args:
        write_base: writes the base model of an exporter as a Hugging Face checkpoint to a directory.
    """
    from slime.weight_sync.send_adapter import AdapterUpdater

    files = None
    if sync.update_weight_transport == "disk":
        settings = _disk_settings(sync, side.post_write)
        files = replace(settings, root=settings.root / "adapter", local=None)
    return AdapterUpdater(side.ranks, lora, base, write_base, files)


def _check_network(args: Namespace) -> Iterator[str]:
    if args.colocate and not args.debug_train_only and not args.debug_rollout_only:
        # engines open the trainer's GPU memory. A segment that grew is opened through the process that made it
        settings = {name: args.train_env_vars.get(name, os.environ.get(name, "")) for name in _ALLOCATOR}
        for name, value in settings.items():
            if "expandable_segments:true" in str(value).lower():
                groups.warn(
                    args,
                    "--colocate",
                    f"{name}={value}: engines may open such memory of the trainer only where they may trace its "
                    "process (CAP_SYS_PTRACE, kernel.yama.ptrace_scope 0); otherwise the first weight sync fails",
                )
    yield from ()


def _check_files(args: Namespace) -> Iterator[str]:
    shared, local = args.update_weight_disk_dir, args.update_weight_local_checkpoint_dir
    if shared is not None:
        if problem := foreign_content(Path(shared)):
            yield problem
        if local is not None and args.rollout_external_engine_addrs is not None:
            yield (
                f"--update-weight-local-checkpoint-dir {local} does not work with --rollout-external-engine-addrs: the "
                "hosts of external engines keep no copy. Use --update-weight-mode full without it."
            )
    if args.update_weight_delta_checksum == "blake3" and importlib.util.find_spec("blake3") is None:
        yield "--update-weight-delta-checksum blake3 needs the package blake3: pip install blake3, or use xxh3-128."


TRANSPORTS: dict[str, Transport] = arguments.TRANSPORTS
"""Value of ``--update-weight-transport`` -> the transport. The flag offers its keys."""

TRANSPORTS |= {
    "nccl": Transport(make=_network, check=_check_network),
    "disk": Transport(
        make=_files,
        reads=(
            "update_weight_disk_dir",
            "update_weight_disk_keep_files",
            "update_weight_local_checkpoint_dir",
            "update_weight_delta_checksum",
            "custom_update_weight_post_write_path",
        ),
        check=_check_files,
    ),
}
