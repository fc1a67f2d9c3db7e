"""The parts of a weight sync that the flags choose: transport, quantization, proof. Built by ``train_actor``.

If ``--hf-checkpoint`` is quantized, the exported weights are quantized on the way, so that engines get the format that
they were started with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slime.backends import (
    EVERY_RANK,
    Canary,
    EngineFleet,
    NamedTensor,
    Recipients,
    WeightExporter,
    weights_dtype,
)
from slime.backends.sglang_utils.checksum import SGLangTensors
from slime.backends.training.arguments import PrecisionArgs
from slime.backends.training.hf_files import save_hf_directory
from slime.config.arguments import ClusterArgs, SyncArgs
from slime.config.groups import RunConfig
from slime.data.engine_fields import FieldFlags
from slime.hooks import load_function
from slime.models.config_json import read_model_config
from slime.models.hf_shape import read_shape
from slime.models.lora import LoraConfig
from slime.ray.run.cluster import node_address
from slime.utils import accelerator
from slime.weight_sync import TRANSPORTS, TrainerSide, with_adapter
from slime.weight_sync.probe import probe_ids
from slime.weight_sync.quantize import Quantizer, find_quantizer
from slime.weight_sync.root_hash import RootProof
from slime.weight_sync.session import OtherWeights, TrainerRanks, WeightUpdate
from slime.weight_sync.updater import Updater

# Median difference of log-probs, in nats, that rounding may cause: in fp32, 16 bits, and with quantized weights.
_TOLERANCES = (0.01, 0.25, 0.75)


def canary_of(
    hf_checkpoint: str, precision: PrecisionArgs, version: str, score: Callable[[list[int]], list[float]]
) -> Canary:
    """The canary of a version of the weights, for which ``score`` returns log-probs."""
    ids = probe_ids(read_shape(hf_checkpoint).vocab_size)
    scores = score(ids)[-(len(ids) // 2) :]
    is_quantized = read_model_config(hf_checkpoint).get("quantization_config") is not None
    is_rounded = weights_dtype(fp16=precision.fp16, fp32=precision.fp32) != "float32"
    return Canary(version, ids, scores, _TOLERANCES[2 if is_quantized else is_rounded])


def root_proof(sync: SyncArgs, hf_checkpoint: str) -> RootProof | None:
    """The comparison of every sync with the engines' tensors, or None with ``--weight-sync-proof canary``."""
    is_cpu = accelerator.current().is_cpu
    is_strict = sync.check_weight_update_equal and is_cpu
    # the older flag asks for the comparison by itself
    if sync.weight_sync_proof != "full" and not is_strict:
        return None
    tensors = SGLangTensors.of(read_shape(hf_checkpoint), on_cpu=is_cpu)
    # the rules of the layout are tested on engines on a CPU only
    return RootProof(tensors, excuses="none" if is_strict else "layers" if is_cpu else "any")


_RANKS_GRACE_S = 120.0  # the source must fail before the other ranks: only its error names the engine


def weight_updater(config: RunConfig, rank: int, world_size: int) -> Updater:
    """The updater of one trainer rank, of the same kind on all ranks."""
    sync = config[SyncArgs]
    ranks = TrainerRanks(rank, world_size, timeout_s=sync.weight_sync_timeout + _RANKS_GRACE_S)
    transport = TRANSPORTS[sync.update_weight_transport]
    path = sync.custom_update_weight_post_write_path
    is_called = path is not None and "custom_update_weight_post_write_path" in transport.reads
    hook = load_function(path) if is_called else None
    # the user's function gets the engines' Ray actors
    post_write = hook and (lambda version_dir, fleet: hook(config.args, version_dir, list(fleet.handles)))
    side = TrainerSide(ranks, node_address, config[ClusterArgs].colocate, post_write)

    def write_base(trainer: WeightExporter, path: str) -> None:
        save_hf_directory(trainer.export_weights(), config.args.hf_checkpoint, path)

    updater, lora = transport.make(sync, side), LoraConfig.of(config.values)
    if lora is not None and config[FieldFlags].serves_adapter:
        updater = with_adapter(updater, lora, sync, side, write_base)
    quantizer = None if config[ClusterArgs].debug_train_only else find_quantizer(config.args.hf_checkpoint)
    return updater if quantizer is None else _QuantizedUpdater(updater, quantizer, config.args.hf_checkpoint)


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
class _QuantizedWeights(OtherWeights):
    """The trainer's weights in the format of ``hf_checkpoint``."""

    quantizer: Quantizer
    hf_checkpoint: str

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        return self.quantizer(super().export_weights(bucket_bytes, recipients))

    def save_hf(self, path: str) -> None:
        save_hf_directory(self.export_weights(), self.hf_checkpoint, path, quantization=self.quantizer.config)
