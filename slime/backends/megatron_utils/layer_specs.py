"""Megatron's local (not TransformerEngine) layers with our core attention and norms, for every family.

Called by ``model``. A spec is Megatron's description of which class to build where; the families' switches decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec_for_backend
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.families.base import Family
from slime.backends.megatron_utils.norms import TorchNorm

__all__ = ["LatentAttention", "PostNormLayer", "block_spec", "mtp_spec"]

_NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")


def block_spec(config: Any, family: Family, vp_stage: int | None = None) -> Any:
    """The decoder layers of this pipeline stage (of its ``vp_stage``-th chunk with interleaving)."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        _adapt(layer, config, family)
    block.layer_norm = TorchNorm
    return block


def mtp_spec(config: Any, block: Any, vp_stage: int | None = None) -> Any | None:
    """The multi-token-prediction layers; None where the stage has none. Each has a layer like the decoder's last."""
    if not config.mtp_num_layers:
        return None
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
    if family.has_post_norms:
        layer.module = PostNormLayer


class LatentAttention(PackedAttention):
    """Core attention where values are narrower than queries and keys: zero columns make up the difference."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._value_width: int = config.v_head_dim

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """query and key ``[t, heads, d]``, value ``[t, heads, d_v]`` with d_v <= d -> ``[t, heads * d_v]``."""
        padded = F.pad(value, (0, query.size(-1) - value.size(-1)))
        out = super().forward(query, key, padded, *args, **kwargs)
        return out.view(out.size(0), -1, query.size(-1))[..., : self._value_width].flatten(1)


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
