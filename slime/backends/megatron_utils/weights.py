"""The weights of a Megatron trainer: filled from checkpoints, written to them, copied, offloaded, exported to engines.

The part of ``actor.MegatronTrainer`` that knows the formats, and the tensors of a live model and optimizer. Must not be
imported before ``patches.install`` ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from slime.backends import EVERY_RANK, TRAINER_PARTS, NamedTensor, Recipients, TrainerPart
from slime.backends.megatron_utils.checkpoint.hf_weights import Content, export_weights, load_weights, save_adapters
from slime.backends.megatron_utils.checkpoint.state import (
    CheckpointContent,
    TrainState,
    load_model_weights,
    load_training_state,
)
from slime.backends.megatron_utils.checkpoint.writer import CheckpointWriter
from slime.backends.megatron_utils.host_adam import HostAdam
from slime.backends.megatron_utils.model.gpt import VALUE_HEAD_PARAMETERS
from slime.backends.megatron_utils.model.lora import adapters_of, fill_adapters
from slime.backends.megatron_utils.optimizer import parts_of, reset_moments
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.hf_files import save_hf_directory
from slime.backends.training.offload import DeviceMemory, WeightBackup
from slime.backends.training.trainer import TrainerBase
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError


class MegatronWeights(TrainerBase):
    """A trainer without passes and steps."""

    _shape: ModelShape
    _ready: TrainState  # set by ``setup``
    _writer: CheckpointWriter | None = None

    def _fill(self, source: Source) -> None:
        """Fill everything, but a critic's head keeps its fresh weights if ``source`` has none that fits."""
        if source.format == "hf":
            model, has_lm_head = self._ready.model, not self.is_critic
            load_weights(model, self._shape, source.directory, source.flag, has_lm_head=has_lm_head)
        else:
            optional = VALUE_HEAD_PARAMETERS if self.is_critic else ()
            load_model_weights(self._ready.model, self._shape, source, optional=optional)

    def _fill_adapters(self) -> None:
        assert self._lora is not None, "the caller has asked"
        fill_adapters(self._ready.model, self._shape, self._lora, self._args.seed)

    def _adapters_off(self) -> AbstractContextManager[None]:
        return adapters_off(self._ready.model)

    @property
    def _adapter(self) -> Mapping[str, Any] | None:
        return self._ready.adapter

    def _reset_moments(self) -> None:
        reset_moments(self._ready.optimizer)

    def _begin_with_filled(self) -> None:
        self._ready.optimizer.reload_model_params()  # else its old main weights would overwrite the loaded weights

    def _resume(self, source: Source, *, has_optimizer: bool, has_rng: bool) -> None:
        load_training_state(self._ready, self._shape, source, CheckpointContent(has_optimizer, has_rng))

    def _copied_weights(self) -> WeightBackup:
        return copied_weights(self._ready.chunks, adapters_only=self._lora is not None)

    def save(self, rollout_id: int) -> None:
        """Write ``<save>/iter_<rollout_id>``. Without --async-save it is complete when all ranks have returned."""
        self._device.require(["weights", "optimizer"], "a checkpoint")
        checkpoint = self._checkpoint
        if checkpoint.save is None:
            raise ConfigError("--save is required to write a checkpoint.")
        if self._writer is None:
            self._writer = CheckpointWriter(checkpoint.save, keep=checkpoint.keep_last_checkpoints)
        content = CheckpointContent(not checkpoint.no_save_optim, not checkpoint.no_save_rng)
        is_last = rollout_id + 1 == self._args.num_rollout
        # A resume takes the actor's latest iteration for both models, so the critic's must be complete before it.
        in_background = checkpoint.async_save and not is_last and not self.is_critic
        self._writer.save(self._ready, self._shape, vars(self._args), rollout_id, content, in_background=in_background)

    def finish_saves(self) -> None:
        """Complete the checkpoint that ``--async-save`` is writing, if any."""
        if self._writer is not None:
            self._writer.finish()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint at ``path``. An error of a writing rank is raised on all ranks."""
        self._device.require(["weights"], "a Hugging Face checkpoint")
        source = self._args.hf_checkpoint
        if self._lora is not None and not self._lora.merge:
            save_adapters(self._ready.model, self._shape, self._lora, source, path)
            return
        weights = export_weights(self._ready.model, self._shape, layout_of=source, content=self._content)
        save_hf_directory(weights, source, path)

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full and unpadded. Gathers ``bucket_bytes`` at a time."""
        self._device.require(["weights"], "the export of weights")
        return export_weights(self._ready.model, self._shape, bucket_bytes, recipients, content=self._content)

    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """The adapters alone under peft's names, whole. Gathers ``bucket_bytes`` at a time."""
        self._device.require(["weights"], "the export of adapters")
        return export_weights(self._ready.model, self._shape, bucket_bytes, recipients, content="adapters")

    @property
    def _content(self) -> Content:
        # engines get the base once, and then adapters
        return "merged" if self._lora is not None and self._lora.merge else "weights"


# ---- weights, gradients and optimizer states among Megatron's tensors. ``training.offload`` moves them


def device_memory(chunks: Sequence[Any], optimizer: Any) -> DeviceMemory:
    """The device memory of this rank's weights, gradients and optimizer states.

    Args:
        chunks: data-parallel wrapped model chunks.
        optimizer: Megatron's optimizer, single or chained.
    """

    def drop_gradients() -> None:
        optimizer.zero_grad(set_to_none=True)  # fp32 copies of them, made by the last step

    return DeviceMemory(partial(_tensors, chunks, optimizer), drop_gradients)


def num_missing_moments(optimizer: Any) -> int:
    """Tensors that the first step adds to each main weight on the device."""
    inner = [part.optimizer for part in parts_of(optimizer)]
    return 2 * any(isinstance(one, torch.optim.AdamW) and not one.state for one in inner)


def copied_weights(chunks: Sequence[Any], *, adapters_only: bool = False) -> WeightBackup:
    """Everything a checkpoint holds: parameters, and the bias with which routers choose experts. Or the adapters."""
    if adapters_only:
        return WeightBackup(parameter for adapter in adapters_of(chunks) for parameter in adapter.parameters())
    weights = []
    for chunk in chunks:
        weights += chunk.parameters()
        weights += [buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")]
    return WeightBackup(weights)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model is its base inside the block."""
    adapters = list(adapters_of(model))
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _tensors(chunks: Sequence[Any], optimizer: Any, part: TrainerPart) -> Iterator[torch.Tensor]:
    match part:
        case "weights":
            for chunk in chunks:
                yield from chunk.parameters()
                yield from (buffer for _, buffer in chunk.named_buffers())
        case "gradients":
            for chunk in chunks:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    yield buffer.grad_data
        case "optimizer":
            for each in parts_of(optimizer):
                yield from _of_optimizer(each.optimizer)
        case _:
            raise ValueError(f"unknown part {part!r}: one of {', '.join(TRAINER_PARTS)}")


def _of_optimizer(inner: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    if inner is None:  # a rank with nothing to train
        return
    if isinstance(inner, HostAdam):  # its groups hold the model's weights, and the rest is in host memory
        yield from inner.device_tensors()
        return
    for group in inner.param_groups:
        yield from group["params"]  # the main weights
    for state in inner.state.values():
        # Fused AdamW has its step counts on the device: 4 bytes each, not worth a copy.
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
