"""Megatron's local (not TransformerEngine) layers with our core attention and norms, for every family.

Called by ``model``. A spec is Megatron's description of which class to build where; the families' switches decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec_for_backend
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from slime.backends.megatron_utils.attention import LatentAttention, PackedAttention
from slime.backends.megatron_utils.families.base import Family
from slime.backends.megatron_utils.gated_delta_net import GatedDeltaNet
from slime.backends.megatron_utils.norms import JointHeadNorm, TorchNorm
from slime.backends.megatron_utils.shape_parts import SparseShape
from slime.backends.megatron_utils.sparse_attention import make_sparse

__all__ = ["PostNormLayer", "block_spec", "mtp_spec"]

_NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")


def block_spec(config: Any, family: Family, vp_stage: int | None = None, *, sparse: SparseShape | None = None) -> Any:
    """The decoder layers of this pipeline stage (of its ``vp_stage``-th chunk with interleaving).

    Raises:
        ConfigError: with ``sparse`` attention, the first of them has no indexer.
    """
    block = _attention_block(config, family, vp_stage)
    if sparse is not None:
        make_sparse(block, sparse, first_layer=get_transformer_layer_offset(config, vp_stage=vp_stage))
    if config.linear_attention_freq is not None:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        block.layer_specs = [
            _delta_net(layer) if config.linear_attention_freq[number] else layer
            for number, layer in enumerate(block.layer_specs, first)
        ]
    return block


def _attention_block(config: Any, family: Family, vp_stage: int | None) -> Any:
    """The same with full attention in every layer."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        _adapt(layer, config, family)
    block.layer_norm = TorchNorm
    return block


def _delta_net(layer: Any) -> ModuleSpec:
    """A copy: Megatron's list has the same object for every layer of a kind."""
    submodules = dataclasses.replace(layer.submodules, self_attention=ModuleSpec(module=GatedDeltaNet))
    return ModuleSpec(module=layer.module, params=layer.params, submodules=submodules)


def mtp_spec(config: Any, family: Family, vp_stage: int | None = None) -> Any | None:
    """The multi-token-prediction layers; None where the stage has none. Each has a layer like the decoder's last, with
    full attention."""
    if not config.mtp_num_layers:
        return None
    block = _attention_block(config, family, vp_stage)
    spec = get_gpt_mtp_block_spec_for_backend(config, block, backend=LocalSpecProvider(), vp_stage=vp_stage)
    for layer in spec.layer_specs if spec is not None else ():
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(layer.submodules, name, TorchNorm)
    return spec


def _adapt(layer: Any, config: Any, family: Family) -> None:
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = LatentAttention if config.multi_latent_attention else PackedAttention
    for owner in (layer.submodules, attention):
        for name in _NORMS:
            if getattr(owner, name, None) not in (None, IdentityOp):
                setattr(owner, name, TorchNorm)
    if config.multi_latent_attention:
        # The rope part of the key leaves the down-projection without another collective: cut by tensor-parallel ranks
        # its gradient would miss the other ranks' share.
        attention.linear_q_down_proj = ReplicatedLinear
        attention.linear_kv_down_proj = ReplicatedLinear
    if family.has_joint_qk_norm:
        attention.q_layernorm = ModuleSpec(JointHeadNorm, params={"num_heads": config.num_attention_heads})
        attention.k_layernorm = ModuleSpec(JointHeadNorm, params={"num_heads": config.num_query_groups})
    if family.has_post_norms:
        layer.module = PostNormLayer


class PostNormLayer(TransformerLayer):
    """GLM-4: a norm on what attention and MLP add to the residual stream."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _normed(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _normed(self.post_mlp_layernorm, self.mlp_bda)


def _normed(norm: torch.nn.Module, add: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's "add bias, drop out, add to the residual stream", behind ``norm``."""

    def build(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        inner = add(training, fused)

        def run(output_with_bias: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = output_with_bias
            return inner((norm(output if bias is None else output + bias), None), residual, dropout)

        return run

    return build
