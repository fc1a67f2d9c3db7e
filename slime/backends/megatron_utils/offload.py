"""Finds the weights, gradients and optimizer states among Megatron's tensors, to be offloaded or copied.

Called by ``actor``. How they are moved is in ``slime.backends.training``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from slime.backends.megatron_utils.model.lora import adapters_of
from slime.backends.megatron_utils.optimizer.build import parts_of
from slime.backends.megatron_utils.optimizer.host_adam import HostAdam
from slime.backends.protocols import TRAINER_PARTS, TrainerPart
from slime.backends.training.offload import DeviceMemory, WeightBackup


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
