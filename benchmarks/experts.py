"""Grouped experts beside Megatron's experts, which follow one another: operator calls and time of a layer, on a CPU.

    python benchmarks/experts.py [--experts 128] [--tokens 1024] [--rounds 9]

Forward and backward pass of one layer in fp32, on one thread. Both layers have the same weights and tokens. Each round
measures both, so that other work on the machine meets both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils.patches import install


class Calls(TorchDispatchMode):
    """Counts operator calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **kwargs or {})


def grouped_layer(num_experts: int, topk: int, *, hidden: int, width: int, **settings: Any) -> Any:
    """A layer with random weights, on the process groups that Megatron has."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.backends.megatron_utils.model.experts import group_experts, sort_tokens

    usual = {"moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none", "moe_grouped_gemm": True}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=4,
        num_moe_experts=num_experts,
        moe_ffn_hidden_size=width,
        moe_router_topk=topk,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        perform_initialization=False,
        use_cpu_initialization=True,
        variable_seq_lengths=True,
        **usual | settings,
    )
    spec = get_gpt_layer_local_spec(num_experts=num_experts)
    group_experts(spec)
    layer = spec.submodules.mlp.module(config, spec.submodules.mlp.submodules, 1)
    sort_tokens(layer)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    return layer


def megatrons_layer(ours: Any) -> Any:
    """Megatron's layer with the weights of a grouped one, one expert after another."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    from slime.backends.megatron_utils.model.experts import experts_of

    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=SequentialMLP, submodules=linear)
    theirs = MoELayer(ours.config, replace(ours.submodules, experts=experts), 1)
    theirs.router.load_state_dict(ours.router.state_dict())
    single = dict(pair for name, weight in ours.named_parameters("mlp") for pair in experts_of(name, weight))
    for name, parameter in theirs.named_parameters("mlp"):
        parameter.data.copy_(single[name])
    return theirs


def calls_of(layer: Any, tokens: torch.Tensor) -> tuple[int, int]:
    """Operator calls of the forward and of the backward pass."""
    with Calls() as calls:
        out, _ = layer(tokens)
        forward = calls.names.total()
        out.sum().backward()
    return forward, calls.names.total() - forward


def _seconds(layer: Any, tokens: torch.Tensor) -> float:
    begin = time.perf_counter()
    layer(tokens)[0].sum().backward()
    return time.perf_counter() - begin


def main() -> None:
    """Print the figures of both layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    install()
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=0, world_size=1)
        mpu.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        ours = grouped_layer(args.experts, args.topk, hidden=args.hidden, width=args.width)
        layers = {"sequential": megatrons_layer(ours), "grouped": ours}
        tokens = torch.randn(args.tokens, 1, args.hidden).requires_grad_()
        calls = {name: sum(calls_of(layer, tokens)) for name, layer in layers.items()}
        rounds = [{name: _seconds(layer, tokens) for name, layer in layers.items()} for _ in range(args.rounds)]
        dist.destroy_process_group()
    ratios = [one["grouped"] / one["sequential"] for one in rounds]
    for name, count in calls.items():
        print(f"{name}: {count} operator calls, {1e3 * statistics.median(one[name] for one in rounds):.1f} ms")
    print(f"calls 1/{calls['sequential'] / calls['grouped']:.0f}, time {statistics.median(ratios):.2f}", end=" ")
    print(f"({min(ratios):.2f} to {max(ratios):.2f}) of the sequential layer")


if __name__ == "__main__":
    main()
