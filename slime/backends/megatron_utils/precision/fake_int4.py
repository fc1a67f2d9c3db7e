"""Fake INT4: experts that compute with the weights that engines of an INT4 checkpoint have after rounding.

    forward     y = x q(w)^T         q(w) = clamp(round(w / s), -8, 7) * s,  s = max|w| / 7.5 per group of a row
    backward    dx = dy q(w),  dw = dy^T x         straight through the rounding (arXiv:1308.3432): dq/dw is taken for 1

The optimizer moves ``w``, which is never rounded, and a weight sync rounds it with the same function: what is trained
and what generates are one model. ``q(w)`` lives no longer than a product, it is made again for the backward pass.
Called by ``setup`` when the model has been built. ``precision_rules`` has checked the flags.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils.checkpoint.tensor_plan import ModelTensors, chunks_of
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import find_quantizer, int4_scale, round_int4

__all__ = ["fake_int4", "fake_quantize_experts"]


def fake_int4(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """``[M, N]`` rounded to what ``quantize_int4`` keeps of it; same shape and dtype.

    Raises:
        ValueError: ``group_size`` does not divide N.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"the group size {group_size} does not divide {columns} columns")
    groups = weight.detach().float().view(rows, columns // group_size, group_size)
    scale = int4_scale(groups).to(weight.dtype)[..., None]
    return (round_int4(groups, scale) * scale.float()).to(weight.dtype).view(rows, columns)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, group_size: int) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.group_size = group_size
        return tokens @ fake_int4(weight, group_size).t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        tokens, weight = ctx.saved_tensors
        (gradient,) = gradients
        wants_tokens, wants_weight, _ = ctx.needs_input_grad
        to_tokens = gradient @ fake_int4(weight, ctx.group_size) if wants_tokens else None
        to_weight = gradient.flatten(0, -2).t() @ tokens.flatten(0, -2) if wants_weight else None
        return to_tokens, to_weight, None


def _multiply(group_size: int, *, input: torch.Tensor, weight: torch.Tensor, **others: Any) -> torch.Tensor:
    """In the place of a linear layer's product; an expert's has neither bias nor communication."""
    given = {name for name, value in others.items() if value} - {"tp_group", "wgrad_deferral_limit"}
    assert not given, f"an expert's product with {given}"
    product: torch.Tensor = _Product.apply(input, weight, group_size)
    return product


def fake_quantize_experts(chunks: Any, shape: ModelShape, hf_checkpoint: str, group_size: int) -> int:
    """Let the layers whose weights are INT4 in ``hf_checkpoint`` compute with rounded ones. Returns how many do here.

    Raises:
        ConfigError: a layer's weights are partly so, or are divided among ranks inside a group.
    """
    quantizer = find_quantizer(hf_checkpoint)
    assert quantizer is not None, "precision_rules requires an INT4 checkpoint"
    tensors = ModelTensors(chunks, shape.family, shape.vocab_size, shape.is_tied)
    layers = {
        id(module.weight): module
        for chunk in chunks_of(chunks)
        for module in chunk.modules()
        if hasattr(module, "_forward_impl") and isinstance(getattr(module, "weight", None), torch.Tensor)
    }
    rank, count = mpu.get_expert_model_parallel_rank(), 0
    for tensor in tensors.local.values():
        names = tensors.hf_names(tensor.place, rank)
        rounded = [name in quantizer.names for name in names]
        if not any(rounded):
            continue
        if not all(rounded):
            raise ConfigError(
                f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG: --hf-checkpoint {hf_checkpoint} has some of {', '.join(names)} in "
                f"INT4 and some not; the trainer has them in one tensor, {tensor.name}. Convert it again."
            )
        columns = tensor.value.shape[-1]
        if columns % group_size:
            raise ConfigError(
                f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG: a rank has {columns} columns of {tensor.name}, which groups of "
                f"{group_size} do not divide. Lower --expert-tensor-parallel-size."
            )
        layers[id(tensor.value)]._forward_impl = partial(_multiply, group_size)
        count += 1
    return count
