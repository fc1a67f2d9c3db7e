"""Matrix products of the package deep_gemm, as the engines compute them (--megatron-deepgemm-forward-layers).

    8 bits   tokens in groups of 128 columns, weights in blocks of 128 x 128, one scale each, rounded as in a weight
             sync (``slime.weight_sync.quantize``)
    16 bits  bf16 throughout

The engines' checkpoint decides between the two. Gradients are those of the bf16 product: straight through the rounding.

    dense     linear layers of attention, MLPs and shared experts: each product is replaced
    experts   all experts of a layer at once: two grouped products and the activation between them

Weights, names, communication and checkpoints do not change. ``setup`` calls ``install_deepgemm`` after it has built the
model. The functions ``enable_*`` do the same as hooks, under names that launch scripts use. The package needs a GPU of
compute capability 9.0. It has not run on a GPU yet.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from slime.backends.megatron_utils.checkpoint.tensors import chunks_of
from slime.backends.megatron_utils.model.experts import GroupedExperts, experts_of, multiply
from slime.backends.training.arguments import PluginArgs
from slime.backends.training.hf_files import raise_everywhere
from slime.config.groups import from_args
from slime.models.config_json import load_model_config
from slime.utils.errors import ConfigError
from slime.weight_sync.quantize import quantize_fp8

_BLOCK = 128


@dataclass(frozen=True)
class Products:
    """The matrix product of an engine.

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

    def of_many(self, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """``[t, K] x [E, N, K] -> [t, N]`` in bf16: rows sorted by expert. Those of expert e end at ``ends[e]``."""
        rows, owners = _in_blocks_of_rows(ends.diff(prepend=ends.new_zeros(1)).tolist(), tokens.device)
        out = tokens.new_empty(len(owners), weights.shape[1])
        padded = tokens.new_zeros(len(owners), tokens.shape[1]).index_copy(0, rows, tokens)
        if self.has_8_bits:
            values, scales = zip(*(self._weight(weight) for weight in weights), strict=True)
            stacked = torch.stack(values), torch.stack(scales)
            _kernel("m_grouped_fp8_gemm_nt_contiguous")(self._tokens(padded), stacked, out, owners)
        else:
            _kernel("m_grouped_bf16_gemm_nt_contiguous")(padded, weights.contiguous(), out, owners)
        return out.index_select(0, rows)

    def of_first(self, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """:meth:`of_one` for the only one of ``weights``."""
        return self.of_one(tokens, weights[0])

    def can_multiply(self, weight: torch.Tensor) -> bool:
        """Whether there is a kernel for a ``weight`` of this shape, ``[N, K]``."""
        rows, columns = weight.shape
        return not self.has_8_bits or (rows % 64 == 0 and columns % _BLOCK == 0)

    def _tokens(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(tokens, (1, _BLOCK), has_power_of_two_scales=self.has_power_of_two_scales)

    def _weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8(weight, (_BLOCK, _BLOCK), has_power_of_two_scales=self.has_power_of_two_scales)


def products_of(hf_checkpoint: str) -> Products:
    """The product of engines that load ``hf_checkpoint``.

    Raises:
        ConfigError: its weights are quantized in another way than 8-bit blocks of 128 x 128.
    """
    config = load_model_config(hf_checkpoint).get("quantization_config")
    if config is None:
        return Products()
    if config.get("quant_method") != "fp8" or config.get("weight_block_size") != [_BLOCK, _BLOCK]:
        raise ConfigError(
            f"--megatron-deepgemm-forward-layers: --hf-checkpoint {hf_checkpoint} is quantized as "
            f"{config.get('quant_method')} with weight_block_size {config.get('weight_block_size')}, and deep_gemm "
            f"multiplies bf16 and fp8 in blocks of {_BLOCK} x {_BLOCK}: leave the flag out, or use such a checkpoint."
        )
    return Products(True, has_power_of_two_scales=config.get("scale_fmt") == "ue8m0")


def _in_blocks_of_rows(counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad each expert's rows to whole blocks.

    Returns:
        The padded position of each row, int64 ``[t]``, and the expert of each padded position, int32, -1 for padding.
    """
    size = int(_kernel("get_mk_alignment_for_contiguous_layout")())
    rows, owners, begin = [], [], 0
    for expert, count in enumerate(counts):
        padded = -(-count // size) * size  # the kernel multiplies a block with one expert's weight
        rows.append(torch.arange(begin, begin + count))
        owners.append(torch.full((padded,), -1, dtype=torch.int32).index_fill(0, torch.arange(count), expert))
        begin += padded
    return torch.cat(rows).to(device), torch.cat(owners).to(device)


def _kernel(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module("deep_gemm"), name)
    return function


_LINEAR = ("self_attention", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.shared_experts")
_EXPERTS = ("mlp.experts",)


def install_deepgemm(chunks: Any, plugins: PluginArgs, hf_checkpoint: str) -> list[str]:
    """Replace the products of the modules that the flags name. A collective. Idempotent.

    Returns:
        Names of the modules on this rank, such as ``3.mlp.linear_fc1``, with the layer's number in the whole model.

    Raises:
        ConfigError: a layer without such modules, a name that matches none, or sizes that deep_gemm cannot multiply.
            Raised on all ranks.
    """
    dense, experts = plugins.megatron_deepgemm_forward_layers, plugins.megatron_deepgemm_moe_forward_layers
    if not dense and not experts:
        return []
    products = products_of(hf_checkpoint)
    linear: dict[str, Any] = {}
    grouped: dict[str, Any] = {}
    if dense:
        names = plugins.megatron_deepgemm_forward_modules
        linear = _select(chunks, dense, names or _LINEAR, "forward", (ColumnParallelLinear, RowParallelLinear))
    if experts:
        names = plugins.megatron_deepgemm_moe_forward_modules
        grouped = _select(chunks, experts, names or _EXPERTS, "moe-forward", (GroupedExperts,))
    weights = [(name, module.weight) for name, module in linear.items()]
    stacks = [(name, stack) for name, module in grouped.items() for stack in (module.linear_fc1, module.linear_fc2)]
    weights += [(name, single) for name, stack in stacks for _, single in experts_of(name, stack.weight)[:1]]
    raise_everywhere(
        [
            f"deep_gemm cannot multiply with {name}, of which a rank has {' x '.join(map(str, weight.shape))}: in 8 "
            "bits the sizes must be multiples of 64 and 128. Leave it out of the --megatron-deepgemm flags."
            for name, weight in weights
            if not products.can_multiply(weight)
        ]
    )
    for module in linear.values():
        module._forward_impl = partial(_linear, products)  # Megatron's linear layers call it by keywords
    for _, stack in stacks:
        stack.product = products.of_many
    return [*linear, *grouped]


def enable_deepgemm_all_forward(args: Namespace, model: Any, store_prefix: str) -> None:
    """Hook for ``--custom-megatron-before-log-prob-hook-path``. Not needed: the flags have the same effect."""
    install_deepgemm(model, from_args(PluginArgs, args), args.hf_checkpoint)


def enable_deepgemm_all_forward_before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Hook for ``--custom-megatron-before-train-step-hook-path``. Not needed: the flags have the same effect."""
    install_deepgemm(model, from_args(PluginArgs, args), args.hf_checkpoint)


def _select(
    chunks: Any, layers: Sequence[int], suffixes: Sequence[str], which: str, kinds: tuple[type, ...]
) -> dict[str, Any]:
    """Modules of these ``kinds`` in the ``layers`` on this rank, whose names or whose parents' names have a suffix."""
    found: dict[str, Any] = {}
    hits: set[tuple[str, int | str]] = set()
    for chunk in chunks_of(chunks):
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            for name, module in layer.named_modules() if number in layers else ():
                fitting = [suffix for suffix in suffixes if f".{suffix}." in f".{name}."]
                if isinstance(module, kinds) and fitting:
                    found[f"{number}.{name}"] = module
                    hits |= {("layer", number), *(("module", suffix) for suffix in fitting)}
    everywhere: list[set[tuple[str, int | str]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, hits)
    hits = set().union(*everywhere)
    flag = f"--megatron-deepgemm-{which}"
    problems = [
        f"{flag}-layers {number}: no such layer has such modules." for number in layers if ("layer", number) not in hits
    ]
    if suffixes not in (_LINEAR, _EXPERTS):  # a model need not have all default modules
        problems += [
            f"{flag}-modules {suffix} finds no module in these layers; names look like self_attention.linear_proj, "
            "mlp.linear_fc1, mlp.experts."
            for suffix in suffixes
            if ("module", suffix) not in hits
        ]
    if problems:
        raise ConfigError(problems)
    return found


def _linear(
    products: Products,
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> torch.Tensor:
    """Replaces the product of Megatron's linear layers, with its communication."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        # The identity, whose backward pass sums the gradients of the tensor ranks.
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    out = multiply(input, weight, product=products.of_first)
    return out if bias is None else out + bias
