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
    "GATED_SHARED_EXPERT",
    "MLA",
    "POST_NORMS",
    "QKV_BIAS",
    "QK_NORM",
    "ROUTER_BIAS",
    "SHARED_EXPERTS",
    "Family",
    "Layout",
    "Rule",
    "Section",
    "Split",
    "decoder_line",
    "mtp_rules",
]

Layout = Literal["copy", "qkv", "gated_qkv", "gate_up", "vocab", "swapped_columns", "by_key_head"]
"""How one Megatron tensor is made of Hugging Face tensors.

copy: it is the tensor.  vocab: the tensor, rows padded.  gate_up: gate above up, from two tensors or from one that is
stacked already.  qkv: per key/value group its query heads, its key head, its value head; groups stacked along dim 0.
gated_qkv: as qkv, where every query head is followed by its output gate; per group Megatron has all its query heads,
then all its gates, then its key head and its value head.
swapped_columns: the tensor with the two halves of its columns exchanged.
by_key_head: the rule's ``sections`` of a gated delta net, per key head behind one another; key heads along dim 0.
"""

Section = tuple[str, ...]
"""Rows of a gated delta net's tensor: per key head what is named, of q, k, v, z, b (writing strength) and a (decay)."""

Split = Literal["none", "column", "row"]
"""How tensor-parallel ranks share it: all hold it, or cut along dim 0 (gate and up each for themselves), or dim 1."""


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Placeholders, zero-based and the same on both sides unless said otherwise: ``{layer}`` of the decoder; ``{expert}``
    of all experts of the layer; ``{mtp}`` of the multi-token-prediction layers, which the Hugging Face side may also
    count behind the decoder's layers as ``{mtp_layer}``. A Megatron name with ``.experts.`` is cut among the ranks of
    expert parallelism and of expert tensor parallelism.

    Attributes:
        sections: with the layout by_key_head: what each Hugging Face tensor is made of.
        stacked: the name under which a checkpoint may have the tensors of all experts as one, expert by expert.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = "copy"
    split: Split = "none"
    sections: tuple[tuple[Section, ...], ...] = ()
    stacked: str | None = None

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.megatron


@dataclass(frozen=True)
class Family:
    """One Hugging Face ``model_type``.

    Attributes:
        rules: the tensor table; a rule whose Megatron tensor a model does not have (a tied output layer, the dense MLP
            of a layer of experts) is not used.
        has_qk_norm: queries and keys are normalised, per head unless ``has_joint_qk_norm``: over all heads together.
        has_qkv_bias: query, key and value projections have a bias.
        has_post_norms: the outputs of attention and MLP are normalised before they join the residual stream.
        has_delta_nets: layers are gated delta nets unless the config says that they have full attention.
        has_output_gate: the output of full attention is multiplied with a sigmoid gate, computed beside the queries.
        has_zero_centred_norms: norms multiply with 1 + their weight.
        has_shared_gate: the output of the shared expert is multiplied with a sigmoid gate.
        is_moe: some layers have experts.
        expert_width: the config field that says how wide an expert is.
        is_mla: multi-latent attention.
        is_sparse: an indexer chooses the keys that a query sees.
        vision_tower: ``model_type`` of the vision tower in transformers; None where the family has none.
        rope_types: ``rope_type`` values that build.
        supports_llama3_rope: ``rope_type`` llama3 is understood besides default.
        defaults: values of config fields that a config.json may leave out, per the family's config class.
        refuses: config fields that must be falsy, as (field, what it would mean).
        ignored: regular expressions of Hugging Face names that need not be read: tensors of the multi-token-prediction
            layers where none are built. ``{num_layers}`` stands for the decoder's number of layers.
        untouched: regular expressions of names that need not be read either: no part of the model that is built.
    """

    model_type: str
    rules: tuple[Rule, ...]
    has_qk_norm: bool = False
    has_joint_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_post_norms: bool = False
    has_delta_nets: bool = False
    has_output_gate: bool = False
    has_zero_centred_norms: bool = False
    has_shared_gate: bool = False
    is_moe: bool = False
    expert_width: str = "moe_intermediate_size"
    is_mla: bool = False
    is_sparse: bool = False
    vision_tower: str | None = None
    rope_types: frozenset[str] = frozenset({"default"})
    supports_llama3_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def decoder_line(megatron: str, *hf: str, layout: Layout = "copy", split: Split = "none") -> Rule:
    """A rule of one decoder layer; names without the layer's prefix."""
    return Rule(_LAYER + megatron, tuple(_HF_LAYER + name for name in hf), layout, split)


def _qkv(kind: str) -> Rule:
    names = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return decoder_line(f"self_attention.linear_qkv.{kind}", *names, layout="qkv", split="column")


EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", "column"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab", "column"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)

ATTENTION = (
    decoder_line("input_layernorm.weight", "input_layernorm.weight"),
    _qkv("weight"),
    decoder_line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split="row"),
)

QKV_BIAS = (_qkv("bias"),)

QK_NORM = tuple(
    decoder_line(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight") for part in ("q", "k")
)

# The two down-projections stand side by side: engines fuse them and need both in one update.
# Row order is the same on both sides: q_b per head [nope | rope], kv_a [latent | rope], kv_b per head [nope | value].
MLA = (
    decoder_line("input_layernorm.weight", "input_layernorm.weight"),
    decoder_line("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", split="column"),
    decoder_line("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    decoder_line("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    decoder_line("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    decoder_line("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    decoder_line("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", split="column"),
    decoder_line("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", split="column"),
    decoder_line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split="row"),
)


def _gated_mlp(megatron: str, hf: str) -> tuple[Rule, Rule]:
    gate, up = f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"
    return (
        decoder_line(f"{megatron}.linear_fc1.weight", gate, up, layout="gate_up", split="column"),
        decoder_line(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", split="row"),
    )


_MLP_NORM = decoder_line("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")

DENSE_MLP = (_MLP_NORM, *_gated_mlp("mlp", "mlp"))

# Names of the norm before the MLP and of dense layers come from DENSE_MLP.
EXPERTS = (
    decoder_line("mlp.router.weight", "mlp.gate.weight"),
    *_gated_mlp("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
)

ROUTER_BIAS = (decoder_line("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),)

SHARED_EXPERTS = _gated_mlp("mlp.shared_experts", "mlp.shared_experts")

GATED_SHARED_EXPERT = (
    *_gated_mlp("mlp.shared_experts", "mlp.shared_expert"),
    decoder_line("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)

# GLM-4 stores gate and up as one tensor.
POST_NORMS = (
    _MLP_NORM,
    decoder_line("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", layout="gate_up", split="column"),
    decoder_line("mlp.linear_fc2.weight", "mlp.down_proj.weight", split="row"),
    decoder_line("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
    decoder_line("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
)


def mtp_rules(
    layer_rules: tuple[Rule, ...],
    hf_prefix: str,
    names: Mapping[str, str],
    projection: Layout = "copy",
    *,
    layer_prefix: str | None = None,
) -> tuple[Rule, ...]:
    """The table of the multi-token-prediction layers.

    Args:
        layer_rules: rules of a decoder layer; the prediction layer has one of its own.
        hf_prefix: prefix of the layer's Hugging Face names.
        names: Hugging Face names of ``enorm`` (of the embedding), ``hnorm`` (of the hidden state), ``eh_proj`` and
            ``final_layernorm``.
        projection: layout of ``eh_proj``; Megatron's columns are [embedding | hidden state].
        layer_prefix: prefix of the names of ``layer_rules``, if not ``hf_prefix``.
    """
    own = "mtp.layers.{mtp}."
    inner = hf_prefix if layer_prefix is None else layer_prefix
    rules = [
        Rule(f"{own}enorm.weight", (hf_prefix + names["enorm"],)),
        Rule(f"{own}hnorm.weight", (hf_prefix + names["hnorm"],)),
        Rule(f"{own}eh_proj.weight", (hf_prefix + names["eh_proj"],), projection, "column"),
        Rule(f"{own}final_layernorm.weight", (hf_prefix + names["final_layernorm"],)),
    ]
    for rule in layer_rules:
        if rule.megatron.startswith(_LAYER):
            megatron = f"{own}transformer_layer." + rule.megatron.removeprefix(_LAYER)
            hf = tuple(inner + name.removeprefix(_HF_LAYER) for name in rule.hf)
            stacked = None if rule.stacked is None else inner + rule.stacked.removeprefix(_HF_LAYER)
            rules.append(replace(rule, megatron=megatron, hf=hf, stacked=stacked))
    return tuple(rules)
