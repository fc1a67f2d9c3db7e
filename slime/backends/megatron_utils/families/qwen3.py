"""Qwen3 (dense): queries and keys are normalised per head."""

from __future__ import annotations

from slime.backends.megatron_utils.families.base import Copy, Family
from slime.backends.megatron_utils.families.llama import DENSE_LAYER

__all__ = ["FAMILY"]

FAMILY = Family(
    "qwen3",
    (
        *DENSE_LAYER,
        *(
            Copy(
                f"decoder.layers.{{layer}}.self_attention.{x}_layernorm.weight",
                f"model.layers.{{layer}}.self_attn.{x}_norm.weight",
            )
            for x in "qk"
        ),
    ),
)
