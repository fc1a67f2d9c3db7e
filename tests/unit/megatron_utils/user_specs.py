"""Users' functions for test_user_spec: what people write who replace parts of the layers."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec


class CountedNorm(torch.nn.RMSNorm):
    """Torch's norm with Megatron's signature. Counts its calls."""

    num_calls = 0

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountedNorm.num_calls += 1
        return super().forward(x)


class HalvedAttention(SelfAttention):
    """Adds half as much to the residual stream."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(*args, **kwargs)
        return 0.5 * output, bias


def layer(args: Namespace, config: Any, vp_stage: int | None) -> ModuleSpec:
    """One layer for all, Megatron's own."""
    return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")


def plain_block(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """The layers of this stage, dense or with experts."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)


def block(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """The same with another norm in front of the MLP."""
    layers = plain_block(args, config, vp_stage)
    for one in layers.layer_specs:
        one.submodules.pre_mlp_layernorm = CountedNorm
    return layers


def halved_attention(args: Namespace, config: Any, vp_stage: int | None) -> ModuleSpec:
    spec = layer(args, config, vp_stage)
    spec.submodules.self_attention.module = HalvedAttention
    return spec


def provider(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """Builds the model itself."""
    from slime.backends.megatron_utils.layer_specs import user_block
    from slime.backends.megatron_utils.model.gpt import PackedGPTModel

    def build(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
        return PackedGPTModel(
            config,
            user_block(layer(args, config, vp_stage), config, vp_stage),
            vocab_size=128,
            max_sequence_length=256,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
        )

    return build


def transformer_engine(args: Namespace, config: Any, vp_stage: int | None) -> ModuleSpec:
    spec = layer(args, config, vp_stage)
    linear = type("TELinear", (), {"__module__": "megatron.core.extensions.transformer_engine"})
    spec.submodules.mlp.submodules.linear_fc1 = linear
    return spec


def nothing(args: Namespace, config: Any, vp_stage: int | None) -> None:
    return None


def without_stage(args: Namespace, config: Any) -> None:
    return None
