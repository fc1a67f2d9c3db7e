"""The weights of an FSDP trainer: filled from checkpoints, written to them, copied and exported to engines.

The part of ``actor.FsdpTrainer`` that knows the formats.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from slime.backends.fsdp_utils import checkpoint
from slime.backends.fsdp_utils.adapters import adapter_parameters, adapters_off, export_adapters, fill_adapters
from slime.backends.fsdp_utils.hf_weights import export_weights, load_weights
from slime.backends.fsdp_utils.model import local_tensor, local_tensors
from slime.backends.fsdp_utils.step import TrainState
from slime.backends.protocols import EVERY_RANK, SOURCE, NamedTensor, Recipients
from slime.backends.training.adapter_files import save_adapter
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.hf_files import TensorReader, save_hf_directory
from slime.backends.training.offload import WeightBackup
from slime.backends.training.trainer import TrainerBase
from slime.models.hf_shape import read_shape
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError


class FsdpWeights(TrainerBase):
    """A trainer without passes and steps."""

    _dtype: torch.dtype
    _state: TrainState | None = None

    @functools.cached_property
    def _shape(self) -> ModelShape:
        """The shape of the model, which only runs with adapters need."""
        return read_shape(self._args.hf_checkpoint)

    @functools.cached_property
    def _names(self) -> set[str]:
        """Tensors of ``--hf-checkpoint``."""
        return TensorReader(self._args.hf_checkpoint, "--hf-checkpoint").names

    @property
    def _ready(self) -> TrainState:
        assert self._state is not None, "setup() comes first"
        return self._state

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
