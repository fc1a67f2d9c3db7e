"""The transport of weights from a trainer rank to the engines, chosen by the command line.

The transports are in ``slime.weight_sync``. If ``--hf-checkpoint`` is quantized, the exported weights are quantized on
the way, so that engines get the format that they were started with.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.backends.protocols import EVERY_RANK, EngineFleet, NamedTensor, Recipients, WeightExporter
from slime.backends.training.hf_files import save_hf_directory
from slime.config.arguments import SyncArgs
from slime.config.groups import from_args
from slime.hooks.load import load_function
from slime.ray.run.cluster import node_address
from slime.weight_sync.quantize import Quantizer, find_quantizer
from slime.weight_sync.session import TrainerRanks, WeightUpdate
from slime.weight_sync.transports import TRANSPORTS, TrainerSide
from slime.weight_sync.updater import Updater

_RANKS_GRACE_S = 60.0  # the source must fail before the other ranks: only its error names the engine


def weight_updater(args: Namespace, rank: int, world_size: int) -> Updater:
    """The updater of one trainer rank, of the same kind on all ranks."""
    updater = _updater(args, rank, world_size)
    quantizer = None if args.debug_train_only else find_quantizer(args.hf_checkpoint)
    return updater if quantizer is None else _QuantizedUpdater(updater, quantizer, args.hf_checkpoint)


def _updater(args: Namespace, rank: int, world_size: int) -> Updater:
    sync = from_args(SyncArgs, args)
    ranks = TrainerRanks(rank, world_size, timeout_s=sync.weight_sync_timeout + _RANKS_GRACE_S)
    transport = TRANSPORTS[sync.update_weight_transport]
    post_write = _post_write(args) if "custom_update_weight_post_write_path" in transport.reads else None
    return transport.make(sync, TrainerSide(ranks, node_address, args.colocate, post_write))


def _post_write(args: Namespace) -> Callable[[str, Any], None] | None:
    """The user's function, which gets the engines' Ray actors."""
    path = args.custom_update_weight_post_write_path
    if path is None:
        return None
    hook = load_function(path)
    return lambda version_dir, fleet: hook(args, version_dir, list(fleet.handles))


@dataclass(frozen=True)
class _QuantizedUpdater:
    """Any updater, for engines with a quantized checkpoint."""

    updater: Updater
    quantizer: Quantizer
    hf_checkpoint: str

    @property
    def changed_share(self) -> float | None:
        return self.updater.changed_share

    def update(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        return self.updater.update(fleet, _QuantizedWeights(trainer, self.quantizer, self.hf_checkpoint), update)

    def disconnect(self) -> None:
        self.updater.disconnect()


@dataclass(frozen=True)
class _QuantizedWeights:
    """The trainer's weights in the format of ``hf_checkpoint``."""

    trainer: WeightExporter
    quantizer: Quantizer
    hf_checkpoint: str

    @property
    def is_weight_source(self) -> bool:
        return self.trainer.is_weight_source

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        return self.quantizer(self.trainer.export_weights(bucket_bytes, recipients))

    def save_hf(self, path: str) -> None:
        save_hf_directory(
            self.export_weights(),
            self.hf_checkpoint,
            path,
            quantization=self.quantizer.config,
        )
