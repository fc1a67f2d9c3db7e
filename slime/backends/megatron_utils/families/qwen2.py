"""Qwen2 and Qwen2.5 (dense): a bias in the query, key and value projections."""

from __future__ import annotations

from slime.backends.megatron_utils.families.base import QKV, Family
from slime.backends.megatron_utils.families.llama import DENSE_LAYER

__all__ = ["FAMILY"]

FAMILY = Family(
    "qwen2",
    (
        *DENSE_LAYER,
        QKV(
            "decoder.layers.{layer}.self_attention.linear_qkv.bias",
            tuple(f"model.layers.{{layer}}.self_attn.{x}_proj.bias" for x in "qkv"),
        ),
    ),
)
