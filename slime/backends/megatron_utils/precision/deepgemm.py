"""The matrix products of the package deep_gemm, which engines use: one weight, or the weights of several experts.

    8 bits   tokens in groups of 128 columns, weights in blocks of 128 x 128, each with a scale of its own; the same
             rounding as a weight sync makes (``slime.weight_sync.quantize``)
    16 bits  bf16 throughout

Which one is the engines': the checkpoint that they load says whether its weights are in 8 bits. Gradients are those of
the product of the bf16 tensors, straight through the rounding. ``deepgemm_forward`` puts these in the place of layers'
products. The package needs a GPU of compute capability 9.0; nothing here has run on one yet.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.models.config_json import load_model_config
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import quantize_fp8

__all__ = ["Products", "multiply", "multiply_grouped", "products_of"]

_BLOCK = 128


@dataclass(frozen=True)
class Products:
    """The kind of product that an engine makes.

    Attributes:
        has_8_bits: tokens and weights are rounded to float8_e4m3fn.
        has_power_of_two_scales: the scales of weights are rounded up to powers of two (UE8M0).
    """

    has_8_bits: bool = False
    has_power_of_two_scales: bool = False

    def of_one(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[t, K] x [N, K] -> [t, N]`` in bf16."""
        out = tokens.new_empty(tokens.shape[0], weight.shape[0])
        if out.numel() == 0:
            return out
        if self.has_8_bits:
            _kernel("fp8_gemm_nt")(self._tokens(tokens), self._weight(weight), out)
        else:
            _kernel("bf16_gemm_nt")(tokens.contiguous(), weight.contiguous(), out)
        return out

    def of_many(self, tokens: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """``[t, K] -> [t, N]`` in bf16: ``counts[i]`` rows, one expert's behind the other's, times ``weights[i]``."""
        rows, owners = _in_blocks_of_rows(counts, tokens.device)
        out = tokens.new_empty(len(owners), weights[0].shape[0])
        if len(rows) == 0:
            return out[:0]
        padded = tokens.new_zeros(len(owners), tokens.shape[1]).index_copy(0, rows, tokens)
        if self.has_8_bits:
            values, scales = zip(*(self._weight(weight) for weight in weights), strict=True)
            stacked = torch.stack(values), torch.stack(scales)
            _kernel("m_grouped_fp8_gemm_nt_contiguous")(self._tokens(padded), stacked, out, owners)
        else:
            _kernel("m_grouped_bf16_gemm_nt_contiguous")(padded, torch.stack(list(weights)), out, owners)
        return out.index_select(0, rows)

    def can_multiply(self, weight: torch.Tensor) -> bool:
        """Whether there is a kernel for a ``weight`` of this shape, ``[N, K]``."""
        rows, columns = weight.shape
        return not self.has_8_bits or (rows % 64 == 0 and columns % _BLOCK == 0)

    def _tokens(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(tokens, (1, _BLOCK), has_power_of_two_scales=self.has_power_of_two_scales)

    def _weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(weight, (_BLOCK, _BLOCK), has_power_of_two_scales=self.has_power_of_two_scales)


def products_of(hf_checkpoint: str) -> Products:
    """What engines that load ``hf_checkpoint`` make.

    Raises:
        ConfigError: its weights are quantised in another way than 8-bit blocks of 128 x 128.
    """
    config = load_model_config(hf_checkpoint).get("quantization_config")
    if config is None:
        return Products()
    if config.get("quant_method") != "fp8" or config.get("weight_block_size") != [_BLOCK, _BLOCK]:
        raise ConfigError(
            f"--megatron-deepgemm-forward-layers: --hf-checkpoint {hf_checkpoint} is quantised as "
            f"{config.get('quant_method')} with weight_block_size {config.get('weight_block_size')}, and deep_gemm "
            f"multiplies bf16 and fp8 in blocks of {_BLOCK} x {_BLOCK}: leave the flag out, or use such a checkpoint."
        )
    return Products(True, has_power_of_two_scales=config.get("scale_fmt") == "ue8m0")


def multiply(products: Products, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[..., K] x [N, K] -> [..., N]`` with gradients."""
    product: torch.Tensor = _Product.apply(products, (tokens.numel() // tokens.shape[-1],), tokens, weight)
    return product


def multiply_grouped(
    products: Products, tokens: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``[t, K] -> [t, N]`` with gradients; as :meth:`Products.of_many`."""
    product: torch.Tensor = _Product.apply(products, tuple(counts), tokens, *weights)
    return product


class _Product(torch.autograd.Function):
    """Rows of the tokens times one weight after the other. The backward pass is the one of plain products."""

    @staticmethod
    def forward(
        ctx: Any, products: Products, counts: tuple[int, ...], tokens: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, *weights)
        ctx.counts = counts
        flat = tokens.flatten(0, -2)
        out = products.of_one(flat, weights[0]) if len(weights) == 1 else products.of_many(flat, counts, weights)
        return out.view(*tokens.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        tokens, *weights = ctx.saved_tensors
        wants_tokens, *wants_weights = ctx.needs_input_grad[2:]
        parts = gradient.flatten(0, -2).split(ctx.counts)
        rows = tokens.flatten(0, -2).split(ctx.counts)
        to_tokens = None
        if wants_tokens:
            products = [part @ weight for part, weight in zip(parts, weights, strict=True)]
            to_tokens = torch.cat(products).view_as(tokens)
        to_weights = [
            part.t() @ row if wanted else None for part, row, wanted in zip(parts, rows, wants_weights, strict=True)
        ]
        return None, None, to_tokens, *to_weights


def _in_blocks_of_rows(counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of rows that the kernel multiplies belongs to one expert, hence each one's rows are filled up to blocks.

    Returns:
        Where each row goes, int64 ``[t]``; and whose each place is, int32, -1 for nobody's.
    """
    size = int(_kernel("get_mk_alignment_for_contiguous_layout")())
    rows, owners, begin = [], [], 0
    for expert, count in enumerate(counts):
        padded = -(-count // size) * size
        rows.append(torch.arange(begin, begin + count))
        owners.append(torch.full((padded,), -1, dtype=torch.int32).index_fill(0, torch.arange(count), expert))
        begin += padded
    return torch.cat(rows).to(device), torch.cat(owners).to(device)


@functools.cache
def _package() -> Any:
    return importlib.import_module("deep_gemm")


def _kernel(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(_package(), name)
    return function
