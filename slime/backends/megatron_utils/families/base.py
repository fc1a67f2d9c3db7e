"""What a model family is: how its Hugging Face tensors and config fields correspond to Megatron's.

A family is data. ``hf_checkpoint`` applies its table in both directions on any parallel layout, ``model_shape`` reads
its config fields, ``layer_specs`` its architecture switches. Imports neither torch nor megatron, so that a command line
can be checked against a checkpoint without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = [
    "ATTENTION",
    "DENSE_MLP",
    "EMBEDDINGS",
    "EXPERTS",
    "MLA",
    "POST_NORMS",
    "QKV_BIAS",
    "QK_NORM",
    "ROUTER_BIAS",
    "SHARED_EXPERTS",
    "Family",
    "Layout",
    "Rule",
    "Split",
    "mtp_rules",
]

Layout = Literal["copy", "qkv", "gate_up", "vocab", "swapped_columns"]
"""How one Megatron tensor is made of Hugging Face tensors.

copy: it is the tensor.  vocab: the tensor, rows padded.  gate_up: gate above up, from two tensors or from one that is
stacked already.  qkv: per key/value group its query heads, its key head, its value head; groups stacked along dim 0.
swapped_columns: the tensor with the two halves of its columns exchanged.
"""

Split = Literal["none", "column", "row"]
"""How tensor-parallel ranks share it: all hold it, or cut along dim 0 (gate and up each for themselves), or dim 1."""


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Placeholders, zero-based and the same on both sides unless said otherwise: ``{layer}`` of the decoder; ``{expert}``
    of all experts of the layer; ``{mtp}`` of the multi-token-prediction layers, which the Hugging Face side may also
    count behind the decoder's layers as ``{mtp_layer}``. A Megatron name with ``.experts.`` is cut among the ranks of
    expert parallelism and of expert tensor parallelism.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = "copy"
    split: Split = "none"

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.megatron


@dataclass(frozen=True)
class Family:
    """One Hugging Face ``model_type``.

    Attributes:
        rules: the tensor table; a rule whose Megatron tensor a model does not have (a tied output layer, the dense MLP
            of a layer of experts) is not used.
        has_qk_norm: queries and keys are normalised per head.
        has_qkv_bias: query, key and value projections have a bias.
        has_post_norms: the outputs of attention and MLP are normalised before they join the residual stream.
        is_moe: some layers have experts.
        is_mla: multi-latent attention.
        rope_types: ``rope_type`` values that build.
        supports_llama3_rope: ``rope_type`` llama3 is understood besides default.
        defaults: values of config fields that a config.json may leave out, per the family's config class.
        refuses: config fields that must be falsy, as (field, what it would mean).
        ignored: regular expressions of Hugging Face names that need not be read: tensors of the multi-token-prediction
            layers where none are built. ``{num_layers}`` stands for the decoder's number of layers.
    """

    model_type: str
    rules: tuple[Rule, ...]
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_post_norms: bool = False
    is_moe: bool = False
    is_mla: bool = False
    rope_types: frozenset[str] = frozenset({"default"})
    supports_llama3_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _line(megatron: str, *hf: str, layout: Layout = "copy", split: Split = "none") -> Rule:
    """A rule of one decoder layer; names without the layer's prefix."""
    return Rule(_LAYER + megatron, tuple(_HF_LAYER + name for name in hf), layout, split)


def _qkv(kind: str) -> Rule:
    names = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return _line(f"self_attention.linear_qkv.{kind}", *names, layout="qkv", split="column")


EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", "column"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab", "column"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)

ATTENTION = (
    _line("input_layernorm.weight", "input_layernorm.weight"),
    _qkv("weight"),
    _line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split="row"),
)

QKV_BIAS = (_qkv("bias"),)

QK_NORM = tuple(
    _line(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight") for part in ("q", "k")
)

# The two down-projections stand side by side: engines fuse them and need both in one update.
# Row order is the same on both sides: q_b per head [nope | rope], kv_a [latent | rope], kv_b per head [nope | value].
MLA = (
    _line("input_layernorm.weight", "input_layernorm.weight"),
    _line("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", split="column"),
    _line("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    _line("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    _line("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    _line("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _line("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", split="column"),
    _line("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", split="column"),
    _line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split="row"),
)


def _gated_mlp(megatron: str, hf: str) -> tuple[Rule, Rule]:
    gate, up = f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"
    return (
        _line(f"{megatron}.linear_fc1.weight", gate, up, layout="gate_up", split="column"),
        _line(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", split="row"),
    )


_MLP_NORM = _line("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")

DENSE_MLP = (_MLP_NORM, *_gated_mlp("mlp", "mlp"))

# Names of the norm before the MLP and of dense layers come from DENSE_MLP.
EXPERTS = (
    _line("mlp.router.weight", "mlp.gate.weight"),
    *_gated_mlp("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
)

ROUTER_BIAS = (_line("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),)

SHARED_EXPERTS = _gated_mlp("mlp.shared_experts", "mlp.shared_experts")

# GLM-4 stores gate and up as one tensor.
POST_NORMS = (
    _MLP_NORM,
    _line("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", layout="gate_up", split="column"),
    _line("mlp.linear_fc2.weight", "mlp.down_proj.weight", split="row"),
    _line("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
    _line("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
)


def mtp_rules(
    layer_rules: tuple[Rule, ...], hf_prefix: str, names: Mapping[str, str], projection: Layout = "copy"
) -> tuple[Rule, ...]:
    """The table of the multi-token-prediction layers.

    Args:
        layer_rules: rules of a decoder layer; the prediction layer has one of its own.
        hf_prefix: prefix of the layer's Hugging Face names.
        names: Hugging Face names of ``enorm`` (of the embedding), ``hnorm`` (of the hidden state), ``eh_proj`` and
            ``final_layernorm``.
        projection: layout of ``eh_proj``; Megatron's columns are [embedding | hidden state].
    """
    own = "mtp.layers.{mtp}."
    rules = [
        Rule(f"{own}enorm.weight", (hf_prefix + names["enorm"],)),
        Rule(f"{own}hnorm.weight", (hf_prefix + names["hnorm"],)),
        Rule(f"{own}eh_proj.weight", (hf_prefix + names["eh_proj"],), projection, "column"),
        Rule(f"{own}final_layernorm.weight", (hf_prefix + names["final_layernorm"],)),
    ]
    for rule in layer_rules:
        if rule.megatron.startswith(_LAYER):
            megatron = f"{own}transformer_layer." + rule.megatron.removeprefix(_LAYER)
            hf = tuple(hf_prefix + name.removeprefix(_HF_LAYER) for name in rule.hf)
            rules.append(replace(rule, megatron=megatron, hf=hf))
    return tuple(rules)
