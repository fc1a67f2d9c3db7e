"""Llama 2, 3, 3.1, 3.2 (dense): no bias, no norm of queries and keys."""

from __future__ import annotations

from slime.backends.megatron_utils.families.base import QKV, Concat, Copy, Family

__all__ = ["DENSE_LAYER", "FAMILY"]

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

DENSE_LAYER = (
    Copy(_M + "input_layernorm.weight", _H + "input_layernorm.weight"),
    QKV(_M + "self_attention.linear_qkv.weight", tuple(_H + f"self_attn.{x}_proj.weight" for x in "qkv")),
    Copy(_M + "self_attention.linear_proj.weight", _H + "self_attn.o_proj.weight"),
    Copy(_M + "pre_mlp_layernorm.weight", _H + "post_attention_layernorm.weight"),
    Concat(_M + "mlp.linear_fc1.weight", (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight")),
    Copy(_M + "mlp.linear_fc2.weight", _H + "mlp.down_proj.weight"),
)
"""The layer that every dense family shares."""

FAMILY = Family("llama", DENSE_LAYER)
