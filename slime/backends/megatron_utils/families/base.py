"""What a model family is: how its Hugging Face tensors and config fields correspond to Megatron's.

A family is data. ``hf_checkpoint`` applies its table in both directions, ``model_shape`` reads its config fields.
Imports neither torch nor megatron, so that a command line can be checked against a checkpoint without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ATTENTION", "DENSE_MLP", "EMBEDDINGS", "QKV_BIAS", "QK_NORM", "Family", "Layout", "Rule"]

Layout = Literal["copy", "qkv", "gate_up", "vocab"]
"""How one Megatron tensor is made of Hugging Face tensors.

copy: it is the tensor.  vocab: the tensor, rows padded.  gate_up: the two stacked along dim 0.
qkv: per key/value group its query heads, its key head, its value head; groups stacked along dim 0.
"""


@dataclass(frozen=True)
class Rule:
    """One line of the table. ``{layer}`` stands for the zero-based layer number on both sides."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = "copy"


@dataclass(frozen=True)
class Family:
    """One Hugging Face ``model_type``.

    Attributes:
        rules: the tensor table; a rule whose Megatron tensor a model does not have (a tied output layer) is not used.
        has_qk_norm: queries and keys are normalised per head.
        has_qkv_bias: query, key and value projections have a bias.
        supports_llama3_rope: ``rope_type`` llama3 is understood besides default.
        defaults: values of config fields that a config.json may leave out, per the family's config class.
        refuses: config fields that must be falsy, as (field, what it would mean).
    """

    model_type: str
    rules: tuple[Rule, ...]
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    supports_llama3_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[tuple[str, str], ...] = ()


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."

EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)


def _qkv(kind: str) -> Rule:
    names = tuple(f"{_HF_LAYER}self_attn.{part}_proj.{kind}" for part in "qkv")
    return Rule(f"{_LAYER}self_attention.linear_qkv.{kind}", names, "qkv")


ATTENTION = (
    Rule(_LAYER + "input_layernorm.weight", (_HF_LAYER + "input_layernorm.weight",)),
    _qkv("weight"),
    Rule(_LAYER + "self_attention.linear_proj.weight", (_HF_LAYER + "self_attn.o_proj.weight",)),
)

DENSE_MLP = (
    Rule(_LAYER + "pre_mlp_layernorm.weight", (_HF_LAYER + "post_attention_layernorm.weight",)),
    Rule(
        _LAYER + "mlp.linear_fc1.weight",
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
        "gate_up",
    ),
    Rule(_LAYER + "mlp.linear_fc2.weight", (_HF_LAYER + "mlp.down_proj.weight",)),
)


QKV_BIAS = (_qkv("bias"),)

QK_NORM = tuple(
    Rule(f"{_LAYER}self_attention.{part}_layernorm.weight", (f"{_HF_LAYER}self_attn.{part}_norm.weight",))
    for part in "qk"
)
