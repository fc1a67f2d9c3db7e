"""Transformer Engine's modules in a model, for --transformer-impl transformer_engine and --fp8-format.

:func:`with_te_layers` exchanges classes in the finished description of a family's layers:

    norm, then column-parallel linear    TELayerNormColumnParallelLinear, if nothing else reads the norm's output
    other linear layers and norms        TEColumnParallelLinear, TERowParallelLinear, TENorm
    attention                            TEDotProductAttention, a ring with context parallelism
    experts                              TEGroupedMLP

Down-projections of latent attention, the core of sparse attention, delta nets, joint and output norms, vision towers,
embedding and head stay. Two kinds of parameters get other names, which ``models.family.local_name`` maps back. Tables,
checkpoints and flags have the local names only. ``megatron.core.extensions.transformer_engine`` is imported inside of
functions: without the package its classes are mocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from slime.backends.megatron_utils.model.attention import PackedAttention
from slime.backends.megatron_utils.model.experts import GroupedExperts
from slime.backends.megatron_utils.model.norms import TorchNorm
from slime.utils.errors import ConfigError


def with_te_layers(spec: Any, config: Any) -> Any:
    """A copy of Megatron's layer ``spec``, or None, with Transformer Engine's classes."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TENorm,
        TERowParallelLinear,
    )

    classes: dict[type, Any] = {
        ColumnParallelLinear: TEColumnParallelLinear,
        RowParallelLinear: TERowParallelLinear,
        TorchNorm: TENorm,
    }
    if config.has_te_attention:
        classes[PackedAttention] = TEDotProductAttention
    copy = with_classes(spec, classes)
    for layer in _layers(copy):
        _join_norms(layer)
        _group_experts(layer)
    return copy


def _layers(spec: Any) -> Iterator[TransformerLayerSubmodules]:
    if isinstance(spec, TransformerLayerSubmodules):
        yield spec
    elif isinstance(spec, list):
        for one in spec:
            yield from _layers(one)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        yield from _layers(list(vars(spec).values()))


def _parts(module: Any) -> Any:
    return module.submodules if isinstance(module, ModuleSpec) else None


def _join_norms(layer: TransformerLayerSubmodules) -> None:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    saved, pair = layer.sharded_state_dict_keys_map, (TENorm, TEColumnParallelLinear)
    attention, mlp = _parts(layer.self_attention), _parts(layer.mlp)
    # The keys of a norm in checkpoints do not change. Megatron may save a local norm under the joined name already.
    if isinstance(attention, SelfAttentionSubmodules) and (layer.input_layernorm, attention.linear_qkv) == pair:
        layer.input_layernorm, attention.linear_qkv = IdentityOp, TELayerNormColumnParallelLinear
        if "input_layernorm." not in saved:
            saved = saved | {"self_attention.linear_qkv.layer_norm_": "input_layernorm."}
    if isinstance(mlp, MLPSubmodules) and (layer.pre_mlp_layernorm, mlp.linear_fc1) == pair:
        layer.pre_mlp_layernorm, mlp.linear_fc1 = IdentityOp, TELayerNormColumnParallelLinear
        if "pre_mlp_layernorm." not in saved:
            saved = saved | {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
    layer.sharded_state_dict_keys_map = saved


def _group_experts(layer: TransformerLayerSubmodules) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear

    parts = _parts(layer.mlp)
    if isinstance(parts, MoESubmodules) and parts.experts == ModuleSpec(module=GroupedExperts):
        linears = MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
        parts.experts = ModuleSpec(module=TEGroupedMLP, submodules=linears)


def prepare_te_layers(model: Any) -> None:
    """Finish a new model: three things that Megatron's wrappers leave open."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TERowParallelGroupedLinear

    for module in model.modules():
        if isinstance(module, TEDotProductAttention):
            # Without the answer, every layer compares two tensors of lengths on the device and waits for the result.
            module.kept_packed_seq_params.add("pad_between_seqs")
        if isinstance(module, TERowParallelGroupedLinear):
            for parameter in module.parameters():
                parameter.partition_dim = 1  # marked as 0 if tensor parallelism divides experts
        if hasattr(module, "fuse_wgrad_accumulation"):
            # The product that makes a weight's gradient adds it to the fp32 sum. Megatron's flag for that also holds
            # for its local layers, such as the LM head, whose kernel is Apex's.
            module.fuse_wgrad_accumulation = True


def with_classes(spec: Any, classes: dict[type, Any]) -> Any:
    """A copy of ``spec``, Megatron's description of layers, with other classes."""
    if isinstance(spec, type):
        if spec.__module__.startswith(("megatron.core.extensions.transformer_engine", "transformer_engine.")):
            raise ConfigError(
                f"--spec: {spec.__name__} is a class of TransformerEngine. Build the layers with "
                "use_transformer_engine=False: --transformer-impl transformer_engine exchanges their classes."
            )
        return classes.get(spec, spec)
    if isinstance(spec, list):
        return [with_classes(one, classes) for one in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return dataclasses.replace(spec, **{name: with_classes(part, classes) for name, part in vars(spec).items()})
    return spec
