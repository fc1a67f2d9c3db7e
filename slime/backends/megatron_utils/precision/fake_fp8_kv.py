"""Fake FP8 of the latent key-values of sparse attention: the trainer attends to what an engine's FP8 cache holds.

    c' = s * e4m3(c / s),   s = max|c| / 448 per block of columns of a token; gradients pass straight through

``c`` is the normed latent of a token, of which all heads make keys and values; the part of the key with positions
stays in 16 bits, as in the cache. Called by ``setup`` when the model has been built; ``precision_rules`` has checked.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.checkpoint.tensor_plan import chunks_of
from slime.backends.megatron_utils.model.sparse_attention import SparseSelfAttention
from slime.weight_sync.quantize import quantize_fp8

__all__ = ["fake_fp8", "fake_quantize_latents"]


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
    """``[..., C]`` rounded as an FP8 cache rounds it; the last block may be smaller. Same shape and dtype."""
    rounded: torch.Tensor = _Rounding.apply(latents, block_size)
    return rounded


def fake_quantize_latents(chunks: Any, block_size: int) -> int:
    """Let every layer of sparse attention see rounded latents. Returns how many there are on this rank."""

    def round_output(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return fake_fp8(output, block_size)

    modules = [module for chunk in chunks_of(chunks) for module in chunk.modules()]
    layers = [module for module in modules if isinstance(module, SparseSelfAttention)]
    for layer in layers:
        layer.kv_layernorm.register_forward_hook(round_output)
    return len(layers)
