"""Which layers of the model multiply with deep_gemm: ``--megatron-deepgemm-forward-layers`` and its relatives.

    dense     linear layers of attention, MLPs and shared experts: the product of each is exchanged
    experts   all experts of a layer at once: two grouped products with the activation between them

Weights, names, communication and checkpoints stay what they are. Called by ``setup`` when the model has been built; the
functions ``enable_*`` do the same as a hook, under names that launch scripts know.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
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
from megatron.core.transformer.moe.experts import SequentialMLP

from slime.backends.megatron_utils.arguments import PluginArgs
from slime.backends.megatron_utils.checkpoint.tensor_plan import chunks_of
from slime.backends.megatron_utils.precision.deepgemm import Products, multiply, multiply_grouped, products_of
from slime.backends.training.hf_files import raise_everywhere
from slime.config.groups import from_args
from slime.utils.errors import ConfigError

__all__ = [
    "enable_deepgemm_all_forward",
    "enable_deepgemm_all_forward_before_train_step",
    "install_deepgemm",
]

_LINEAR = ("self_attention", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.shared_experts")
_EXPERTS = ("mlp.experts",)


def install_deepgemm(chunks: Any, plugins: PluginArgs, hf_checkpoint: str) -> list[str]:
    """Exchange the products that the flags name. A collective. May be repeated.

    Returns:
        Names of the exchanged modules on this rank, such as ``3.mlp.linear_fc1``; layers as the whole model counts.

    Raises:
        ConfigError: a layer without such modules, a name that fits none, or sizes that deep_gemm cannot multiply. On
            all ranks.
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
        grouped = _select(chunks, experts, names or _EXPERTS, "moe-forward", (SequentialMLP,))
    weights = [(name, module.weight) for name, module in linear.items()]
    for name, module in grouped.items():
        first = module.local_experts[0]
        weights += [(name, first.linear_fc1.weight), (name, first.linear_fc2.weight)]
    raise_everywhere(
        [
            f"deep_gemm cannot multiply with {name}, of which a rank has {' x '.join(map(str, weight.shape))}: in 8 "
            "bits the sizes must be multiples of 64 and 128. Leave it out of the --megatron-deepgemm flags."
            for name, weight in weights
            if not products.can_multiply(weight)
        ]
    )
    for module in linear.values():
        module._forward_impl = partial(_linear, products)
    for module in grouped.values():
        module.forward = partial(_experts, products, module)
    return [*linear, *grouped]


def enable_deepgemm_all_forward(args: Namespace, model: Any, store_prefix: str) -> None:
    """For ``--custom-megatron-before-log-prob-hook-path``. The trainer has done it already: the flags suffice."""
    install_deepgemm(model, from_args(PluginArgs, args), args.hf_checkpoint)


def enable_deepgemm_all_forward_before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """For ``--custom-megatron-before-train-step-hook-path``. The trainer has done it already: the flags suffice."""
    install_deepgemm(model, from_args(PluginArgs, args), args.hf_checkpoint)


def _select(
    chunks: Any, layers: Sequence[int], suffixes: Sequence[str], which: str, kinds: tuple[type, ...]
) -> dict[str, Any]:
    """Modules of these ``kinds`` in the ``layers`` on this rank whose names end with one of ``suffixes``, or lie below
    one. A module of an expert is the experts' own."""
    found: dict[str, Any] = {}
    hits: set[tuple[str, int | str]] = set()
    for chunk in chunks_of(chunks):
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            for name, module in layer.named_modules() if number in layers else ():
                fitting = [suffix for suffix in suffixes if f".{suffix}." in f".{name}."]
                if isinstance(module, kinds) and fitting and ".local_experts." not in name:
                    found[f"{number}.{name}"] = module
                    hits |= {("layer", number), *(("module", suffix) for suffix in fitting)}
    everywhere: list[set[tuple[str, int | str]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, hits)
    hits = set().union(*everywhere)
    flag = f"--megatron-deepgemm-{which}"
    problems = [
        f"{flag}-layers {number}: no such layer has such modules." for number in layers if ("layer", number) not in hits
    ]
    if suffixes not in (_LINEAR, _EXPERTS):
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
    """In the place of the product of Megatron's linear layers, with the communication that belongs to it there."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    out = multiply(products, input, weight)
    return out if bias is None else out + bias


def _experts(
    products: Products, module: Any, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """In the place of ``SequentialMLP.forward``: ``hidden`` ``[t, h]``, one expert's tokens behind the other's."""
    counts = tokens_per_expert.tolist()
    gate_up = multiply_grouped(products, hidden, counts, [one.linear_fc1.weight for one in module.local_experts])
    gate, up = gate_up.chunk(2, dim=-1)
    inner = (module.config.activation_func(gate) * up * probs.unsqueeze(-1)).to(hidden.dtype)
    out = multiply_grouped(products, inner, counts, [one.linear_fc2.weight for one in module.local_experts])
    return out, None
