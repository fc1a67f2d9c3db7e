"""Low precision of single layers: FP8 latents, INT4 experts and FP8 linear layers. ``setup`` calls these functions.

FP8 latents of sparse attention, so that the trainer attends to the values in an engine's FP8 cache:

    c' = s * e4m3(c / s),   s = max|c| / 448 per block of columns of a token

INT4 experts, so that the trainer computes with the rounded weights of an INT4 engine:

    forward     y = x q(w)^T         q(w) = clamp(round(w / s), -8, 7) * s,  s = max|w| / 7.5 per group of a row
    backward    dx = dy q(w),  dw = dy^T x

Gradients pass straight through the rounding (arXiv:1308.3432).

FP8 linear layers (--fp8-format) are those of ``model.te_layers``, which read Megatron's FP8 context. Embedding, LM
head, attention and norms stay in bf16. The FP8 layers have not run on a GPU yet.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core import parallel_state as mpu
from megatron.core.enums import Fp8Recipe
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from slime.backends.megatron_utils.checkpoint.tensors import ModelTensors, chunks_of
from slime.backends.megatron_utils.model.experts import ExpertLinear, multiply
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import find_quantizer, int4_scale, quantize_fp8, round_int4


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latents: torch.Tensor, block_size: int) -> torch.Tensor:
        rows = latents.reshape(-1, latents.shape[-1])
        values, scale = quantize_fp8(rows, (1, block_size))
        factors = scale.repeat_interleave(block_size, dim=1)[:, : rows.shape[1]]
        return (values.float() * factors).to(latents.dtype).view(latents.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def fake_fp8(latents: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[..., C]`` rounded as in an FP8 cache. The last block may be smaller. Same shape and dtype."""
    rounded: torch.Tensor = _Rounding.apply(latents, block_size)  # type: ignore[no-untyped-call]
    return rounded


def fake_int4(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """``[M, N]`` rounded as by ``quantize_int4``. Same shape and dtype.

    Raises:
        ValueError: ``group_size`` does not divide N.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"the group size {group_size} does not divide {columns} columns")
    groups = weight.detach().float().view(rows, columns // group_size, group_size)
    scale = int4_scale(groups).to(weight.dtype)[..., None]  # the dtype in which engines have the scales
    return (round_int4(groups, scale) * scale.float()).to(weight.dtype).view(rows, columns)


_ROUNDED_TOGETHER = 2**26
"""Weights. Rounding takes several times their memory in fp32."""


def _fake_int4_experts(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """:func:`fake_int4` of the experts of a layer, a few at a time."""
    rows = max(1, _ROUNDED_TOGETHER // weight.shape[1])
    return torch.cat([fake_int4(part, group_size) for part in weight.split(rows)])


def _multiply(group_size: int, *, input: torch.Tensor, weight: torch.Tensor, **others: Any) -> torch.Tensor:
    """Replaces the product of a linear layer, which has neither bias nor communication."""
    given = {name for name, value in others.items() if value} - {"tp_group", "wgrad_deferral_limit"}
    assert not given, f"a product in INT4 with {given}"
    return multiply(input, weight, rounding=partial(fake_int4, group_size=group_size))


def fake_quantize_experts(chunks: Any, shape: ModelShape, hf_checkpoint: str, group_size: int) -> int:
    """Round the weights in the layers that are INT4 in ``hf_checkpoint``. Returns their number on this rank.

    The experts of a layer count as one.

    Raises:
        ConfigError: a layer's weights are partly INT4, or are divided among ranks inside a group.
    """
    quantizer = find_quantizer(hf_checkpoint)
    assert quantizer is not None, "precision_rules requires an INT4 checkpoint"
    tensors = ModelTensors(chunks, shape.family, shape.vocab_size, shape.is_tied)
    # Tensors are found by identity: == would compare their elements.
    layers = {
        id(module.weight): module
        for chunk in chunks_of(chunks)
        for module in chunk.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | ExpertLinear) and module.weight is not None
    }
    rank = mpu.get_expert_model_parallel_rank()
    names: defaultdict[int, list[str]] = defaultdict(list)
    for tensor in tensors.local.values():
        names[id(tensor.owner)] += tensors.hf_names(tensor.place, rank)
    rounded = {owner: [name for name in owned if name in quantizer.names] for owner, owned in names.items()}
    for owner, (first, *_) in [one for one in rounded.items() if one[1]]:
        layer = layers[owner]
        if others := [name for name in names[owner] if name not in quantizer.names]:
            raise ConfigError(
                f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG: --hf-checkpoint {hf_checkpoint} has {first} in INT4 and "
                f"{others[0]} not; the trainer has them in one tensor. Convert it again."
            )
        if (columns := layer.weight.shape[1]) % group_size:
            raise ConfigError(
                f"OPEN_TRAINING_INT4_FAKE_QAT_FLAG: a rank has {columns} columns of {first}, which groups of "
                f"{group_size} do not divide. Lower --expert-tensor-parallel-size."
            )
        if isinstance(layer, ExpertLinear):
            layer.rounding = partial(_fake_int4_experts, group_size=group_size)
        else:
            layer._forward_impl = partial(_multiply, group_size)
    return sum(map(bool, rounded.values()))


def token_multiple(config: Any) -> int:
    """The tokens of a rank must be a multiple of this for FP8 products."""
    return int(fp8_utils.get_fp8_align_size(config.fp8_recipe)) if config.fp8 else 1


def check_recipe(config: Any) -> None:
    """Check the FP8 recipe before the first step.

    Raises:
        ConfigError: this TransformerEngine does not have the recipe, or --fp8-quantizer-factory names no function.
    """
    try:
        fp8_utils.get_fp8_recipe(config)
    except (ValueError, AssertionError) as error:
        name = Fp8Recipe(config.fp8_recipe).value
        factory = f" with --fp8-quantizer-factory {config.fp8_quantizer_factory}" if name == "custom" else ""
        raise ConfigError(f"--fp8-recipe {name}{factory}: {error}") from error


def readable(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, with --fp8-param-gather converted to bf16: values times scale."""
    if fp8_utils.is_float8tensor(weight):
        whole: torch.Tensor = fp8_utils.dequantize_fp8_tensor(weight)
        return whole.detach()
    return weight.detach()
