"""The weights of an FSDP trainer: filled from checkpoints, written to them, copied and exported to engines.

The part of ``actor.FsdpTrainer`` that knows the formats. Between a Hugging Face checkpoint and the sharded model:

    load     every rank reads a tensor and keeps its rows, one tensor at a time
    export   a tensor's rows are gathered from all ranks, one tensor at a time

Models of transformers hold the experts of a layer in one tensor, most checkpoints one by one; names are those of the
checkpoint.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from slime.backends import EVERY_RANK, SOURCE, NamedTensor, Recipients
from slime.backends.fsdp_utils import checkpoint
from slime.backends.fsdp_utils.model import (
    adapter_parameters,
    adapters_off,
    copy_rows,
    deltas,
    export_adapters,
    fill_adapters,
    is_adapter,
    is_tied,
    local_tensor,
    local_tensors,
    plain_name,
    saved_tensors,
    whole_tensor,
)
from slime.backends.fsdp_utils.step import TrainState
from slime.backends.training.adapter_files import save_adapter
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.hf_files import TensorReader, raise_everywhere, save_hf_directory
from slime.backends.training.offload import WeightBackup
from slime.backends.training.trainer import TrainerBase
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError


class FsdpWeights(TrainerBase):
    """A trainer without passes and steps."""

    _dtype: torch.dtype
    _ready: TrainState  # set by ``setup``

    @functools.cached_property
    def _shape(self) -> ModelShape:
        """The shape of the model, which only runs with adapters need."""
        return read_shape(self._args.hf_checkpoint)

    @functools.cached_property
    def _names(self) -> set[str]:
        """Tensors of ``--hf-checkpoint``."""
        return TensorReader(self._args.hf_checkpoint, "--hf-checkpoint").names

    def _copied_weights(self) -> WeightBackup:
        if self._lora is None:
            return WeightBackup(local_tensors(self._ready.model))
        return WeightBackup(local_tensor(value) for _, value in adapter_parameters(self._ready.model))

    def _fill_adapters(self) -> None:
        assert self._lora is not None, "the caller has asked"
        fill_adapters(self._ready.model, self._lora, self._args.seed)

    def _adapters_off(self) -> AbstractContextManager[None]:
        return adapters_off(self._ready.model)

    @property
    def _adapter(self) -> Mapping[str, Any] | None:
        return self._ready.adapter

    def _fill(self, source: Source) -> None:
        if source.format == "hf":
            load_weights(self._ready.model, source.directory, source.flag)
        else:
            checkpoint.load_weights(self._ready, source)

    def _resume(self, source: Source, *, has_optimizer: bool, has_rng: bool) -> None:
        checkpoint.load_training_state(self._ready, source, has_optimizer=has_optimizer, has_rng=has_rng)

    def save(self, rollout_id: int) -> None:
        """Write ``<save>/iter_<rollout_id>``. It is complete when this returns on all ranks."""
        self._device.require(["weights", "optimizer"], "a checkpoint")
        settings = self._checkpoint
        if settings.save is None:
            raise ConfigError("--save is required to write a checkpoint.")
        checkpoint.save(
            self._ready,
            settings.save,
            rollout_id,
            has_optimizer=not settings.no_save_optim,
            has_rng=not settings.no_save_rng,
            keep=settings.keep_last_checkpoints,
        )

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint at ``path``. An error of a writing rank is raised on all ranks."""
        self._device.require(["weights"], "a Hugging Face checkpoint")
        if self._lora is not None and not self._lora.merge:
            weights = export_adapters(self._ready.model, None, SOURCE)
            save_adapter(weights, self._lora, self._shape, self._args.hf_checkpoint, path)
        else:
            save_hf_directory(self.export_weights(), self._args.hf_checkpoint, path)

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full. With adapters those of the base, or merged ones."""
        self._device.require(["weights"], "the export of weights")
        # One tensor at a time, whatever ``bucket_bytes`` is.
        merges = self._lora is not None and self._lora.merge
        return export_weights(self._ready.model, self._names, self._dtype, recipients, merges=merges)

    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """The adapters under peft's names without prefix, whole."""
        self._device.require(["weights"], "the export of adapters")
        return export_adapters(self._ready.model, self._dtype, recipients)


# Tensors ``[experts, rows, columns]`` of the model, and the parts that make up one expert's rows in a checkpoint.
_PARTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NEVER_READ = (r"\.rotary_emb\.inv_freq$",)  # some checkpoints hold it; the model computes it


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the model and its name in a checkpoint.

    Attributes:
        key: its name in the model, another one if an adapter belongs to it.
        value: parameter, sharded or not, or buffer.
        names: ``[experts][parts]``. One name in one row if the checkpoint has the same tensor.
    """

    name: str
    key: str
    value: torch.Tensor
    names: list[list[str]]

    @property
    def is_fused(self) -> bool:
        return self.names != [[self.name]]

    def join(self, reader: TensorReader) -> torch.Tensor:
        if not self.is_fused:
            return reader.get(self.name)
        return torch.stack([torch.cat([reader.get(name) for name in parts]) for parts in self.names])

    def split(self, whole: torch.Tensor, experts: range) -> Iterator[NamedTensor]:
        """``whole`` under the checkpoint's names. Of experts with separate names only ``experts``."""
        if not self.is_fused:
            yield self.name, whole
            return
        for number in experts:
            parts = self.names[number]
            yield from zip(parts, whole[number].chunk(len(parts)), strict=True)


def hf_tensors(model: PreTrainedModel, checkpoint_names: set[str]) -> Iterator[HfTensor]:
    """The tensors of a checkpoint, parameters first, without adapters. A tied head is left out."""
    for key, value in saved_tensors(model).items():
        if not is_adapter(key):
            name = plain_name(key)
            yield HfTensor(name, key, value, _names(name, value, checkpoint_names))


def _names(name: str, value: torch.Tensor, checkpoint_names: set[str]) -> list[list[str]]:
    parts = next((parts for suffix, parts in _PARTS.items() if name.endswith(f".{suffix}")), None)
    if parts is None or name in checkpoint_names:
        return [[name]]
    stem = name.rpartition(".")[0]
    return [[f"{stem}.{expert}.{part}.weight" for part in parts] for expert in range(value.shape[0])]


@torch.no_grad()
def load_weights(model: PreTrainedModel, directory: str, flag: str) -> None:
    """Fill every parameter of ``model`` from the safetensors files in ``directory``. A collective.

    Args:
        flag: the flag that named the directory, for messages.

    Raises:
        ConfigError: tensors are missing, unknown, or of another shape than the model's. On all ranks.
    """
    try:
        reader = TensorReader(directory, flag)
    except ConfigError as error:
        raise_everywhere(error.problems)  # the other ranks meet this collective at the end of this function
        raise
    problems: list[str] = []
    used: set[str] = set()
    for tensor in hf_tensors(model, reader.names):
        used |= {name for parts in tensor.names for name in parts}
        problems += _fill(tensor, reader)
    problems += [
        f"{reader.where}: tensor {name} has no place in the model that config.json describes."
        for name in sorted(reader.names - used)
        if not _is_left_out(model, name)
    ]
    if not dist.is_initialized() or dist.get_rank() == 0:  # all ranks read the same files
        problems += reader.tied_head(is_tied(model))
    raise_everywhere(problems)


def _is_left_out(model: PreTrainedModel, name: str) -> bool:
    layer = _LAYER.match(name)
    # A prediction layer, which transformers does not build.
    if layer and int(layer.group(1)) >= model.config.num_hidden_layers:
        return True
    patterns = [*_NEVER_READ, *(model._keys_to_ignore_on_load_unexpected or ())]
    return (name == "lm_head.weight" and is_tied(model)) or any(re.search(pattern, name) for pattern in patterns)


def _fill(tensor: HfTensor, reader: TensorReader) -> list[str]:
    missing = [name for parts in tensor.names for name in parts if name not in reader]
    if missing:
        return [f"{reader.where}: tensor {name} is missing in its .safetensors files." for name in missing]
    # Rounding integers to floats would hide a format that is not read.
    if tensor.value.is_floating_point() and (wrong := reader.integers(name for row in tensor.names for name in row)):
        return wrong
    whole = tensor.join(reader)  # in host memory: one whole tensor at a time
    if whole.shape != tensor.value.shape:
        return [
            f"{reader.where}: {tensor.name} is {list(whole.shape)}, but the model that config.json describes needs "
            f"{list(tensor.value.shape)}: config.json and weights do not belong together."
        ]
    copy_rows(tensor.value, whole)
    return []


@torch.no_grad()
def export_weights(
    model: PreTrainedModel,
    checkpoint_names: set[str],
    dtype: torch.dtype,
    recipients: Recipients = EVERY_RANK,
    *,
    merges: bool = False,
) -> Iterator[NamedTensor]:
    """All weights under the checkpoint's names, whole. A collective.

    Args:
        checkpoint_names: of --hf-checkpoint, which show whether experts have separate names.
        dtype: of parameters; buffers keep theirs.
        recipients: the ranks that get the tensors. The others get none.
        merges: adapters are added to the weights they belong to.
    """
    added = deltas(model) if merges else {}
    rank = dist.get_rank() if dist.is_initialized() else 0
    for tensor in hf_tensors(model, checkpoint_names):
        value: Any = tensor.value
        if tensor.key in added:
            *factors, scale = added[tensor.key]
            down, up = map(whole_tensor, factors)
            value = (whole_tensor(value).float() + scale * (up.float() @ down.float())).to(dtype)
        elif isinstance(value, DTensor):
            # cast before the gather: half the bytes, and layers compute with the cast weights anyway
            rows: Any = value.to(dtype)
            value = _on_first(rows) if recipients.source_only else rows.full_tensor()
        if rank == 0 or not recipients.source_only:
            yield from tensor.split(value.detach(), recipients.experts(rank, len(tensor.names)))


def _on_first(value: DTensor) -> torch.Tensor:
    """The whole tensor on rank 0, and this rank's rows elsewhere."""
    mesh, rows = value.device_mesh, value.to_local()
    # as torch.chunk, by which FSDP divides rows: the last ranks may have fewer, or none
    most = -(-value.shape[0] // mesh.size())
    padded = rows.new_zeros(most, *value.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(mesh.size())] if mesh.get_rank() == 0 else None
    dist.gather(padded, parts, group=mesh.get_group(), group_dst=0)
    return rows if parts is None else torch.cat(parts)[: value.shape[0]]
