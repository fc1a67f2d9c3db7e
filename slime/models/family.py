"""A model family, its table of tensor names, and the registry of all families.

To add a family, define a :class:`Family` in a file of ``slime/models/families``. The plan, the checks, the trainer and
the table in docs/model_families.md read it. A table is a sum of tables below: how Hugging Face tensors
correspond to Megatron's, in both directions. ``megatron_utils.checkpoint.hf_weights`` applies it on any ranks.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

MOST_LAYERS = 10_000
"""A larger number is a mistake, and lists with one entry per layer would fill the memory."""

Layout = Literal["copy", "qkv", "gated_qkv", "gate_up", "vocab", "swapped_columns", "by_key_head"]
"""How a Megatron tensor is assembled from Hugging Face tensors.

copy: unchanged.
vocab: unchanged, with padding rows.
gate_up: gate above up, from two tensors or from one that already has both.
qkv: for each key/value group its query heads, its key head and its value head; groups are stacked along dim 0.
gated_qkv: as qkv. Hugging Face has [query | output gate] per query head; Megatron has all queries of a group, all its
    gates, then its key head and its value head.
swapped_columns: the two halves of the columns exchanged.
by_key_head: the ``sections`` of a gated delta net's tensors, grouped by key head; key heads are stacked along dim 0.
"""

Section = tuple[str, ...]
"""Rows of a gated delta net's tensor, per key head: the named ones of q, k, v, z, b (write strength) and a (decay)."""

Split = Literal["none", "column", "row"]
"""How tensor-parallel ranks share a tensor: every rank has it whole, or it is split along dim 0 or dim 1.
Gate and up are split separately."""


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors that it is assembled from.

    Placeholders in names are zero-based: ``{layer}`` of the decoder; ``{expert}`` among all experts of the layer;
    ``{mtp}`` among the multi-token-prediction layers. The Hugging Face side may also use ``{mtp_layer}``, which
    continues the numbers of the decoder's layers. A Megatron name with ``.experts.`` is split among the ranks of
    expert parallelism and of expert tensor parallelism.

    Attributes:
        sections: for the layout by_key_head: the content of each Hugging Face tensor.
        stacked: the name of a tensor that holds all experts of a layer, if checkpoints may have one.
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

    @property
    def is_adapter(self) -> bool:
        return ".adapter." in self.megatron


Rules = tuple[Rule, ...]

# Transformer Engine joins a norm with the projection after it, and numbers the experts' weights of one module.
_LOCAL_NAMES = (
    (re.compile(r"\bself_attention\.linear_qkv\.layer_norm_(?=weight$)"), "input_layernorm."),
    (re.compile(r"\bmlp\.linear_fc1\.layer_norm_(?=weight$)"), "pre_mlp_layernorm."),
    (re.compile(r"\bmlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)


def local_name(name: str) -> str:
    """Megatron's name, in a model of local layers, of a parameter of local or of Transformer Engine's layers."""
    for pattern, replacement in _LOCAL_NAMES:
        name = pattern.sub(replacement, name)
    return name


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def decoder_line(megatron: str, *hf: str, layout: Layout = "copy", split: Split = "none") -> Rule:
    """A rule of one decoder layer; names are given without the layer's prefix."""
    return Rule(_LAYER + megatron, tuple(_HF_LAYER + name for name in hf), layout, split)


def _qkv(kind: str, layout: Layout = "qkv") -> Rule:
    names = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return decoder_line(f"self_attention.linear_qkv.{kind}", *names, layout=layout, split="column")


def _qk_norm(split: Split) -> Rules:
    return tuple(
        decoder_line(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", split=split)
        for part in "qk"
    )


EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", "column"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab", "column"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)

_INPUT_NORM = decoder_line("input_layernorm.weight", "input_layernorm.weight")
_OUTPUT_PROJECTION = decoder_line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split="row")

ATTENTION = (_INPUT_NORM, _qkv("weight"), _OUTPUT_PROJECTION)

QKV_BIAS = (_qkv("bias"),)

QK_NORM = _qk_norm("none")

# The weight spans all heads together, so tensor-parallel ranks share it like the heads.
JOINT_QK_NORM = _qk_norm("column")

GATED_ATTENTION = (_INPUT_NORM, _qkv("weight", "gated_qkv"), _OUTPUT_PROJECTION, *QK_NORM)

# q_down and kv_down must stay adjacent: engines fuse them and need both in one update.
# Row order is the same on both sides: q_b per head [nope | rope], kv_a [latent | rope], kv_b per head [nope | value].
MLA = (
    _INPUT_NORM,
    decoder_line("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", split="column"),
    decoder_line("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    decoder_line("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    decoder_line("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    decoder_line("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    decoder_line("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", split="column"),
    decoder_line("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", split="column"),
    _OUTPUT_PROJECTION,
)

# Sparse attention. The indexer's rows have the same order on both sides: per head [rope | rest].
INDEXER = tuple(
    decoder_line(f"self_attention.indexer.{name}", f"self_attn.indexer.{name}")
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
)


def _gated_mlp(megatron: str, hf: str) -> Rules:
    gate, up = f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"
    return (
        decoder_line(f"{megatron}.linear_fc1.weight", gate, up, layout="gate_up", split="column"),
        decoder_line(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", split="row"),
    )


MLP_NORM = (decoder_line("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),)

DENSE_MLP = MLP_NORM + _gated_mlp("mlp", "mlp")

# Without the norm before the MLP: MLP_NORM or DENSE_MLP has it.
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


def stacked_experts(rules: Rules) -> Rules:
    """``rules`` for checkpoints that may hold all experts of a layer as one tensor."""

    def stacked(rule: Rule) -> Rule:
        name = "gate_up_proj" if rule.layout == "gate_up" else "down_proj"
        return replace(rule, stacked=f"{_HF_LAYER}mlp.experts.{name}") if rule.is_expert else rule

    return tuple(map(stacked, rules))


def delta_net(in_proj: dict[str, tuple[Section, ...]]) -> Rules:
    """The table of a gated delta net.

    Args:
        in_proj: the Hugging Face tensors of the input projection, by name, and the sections of each.
    """

    def by_key_head(megatron: str, tensors: dict[str, tuple[Section, ...]]) -> Rule:
        names = tuple(f"linear_attn.{name}.weight" for name in tensors)
        rule = decoder_line(f"self_attention.{megatron}.weight", *names, layout="by_key_head", split="column")
        return replace(rule, sections=tuple(tensors.values()))

    return (
        by_key_head("in_proj", in_proj),
        by_key_head("conv1d", {"conv1d": (("q",), ("k",), ("v",))}),
        decoder_line("self_attention.A_log", "linear_attn.A_log", split="column"),
        decoder_line("self_attention.dt_bias", "linear_attn.dt_bias", split="column"),
        decoder_line("self_attention.out_norm.weight", "linear_attn.norm.weight"),
        decoder_line("self_attention.out_proj.weight", "linear_attn.out_proj.weight", split="row"),
    )


# Names of the tensors that only a multi-token-prediction layer has: norms of the embedding and of the hidden state, the
# projection of both into one, the last norm.
DEEPSEEK_MTP = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
QWEN_MTP = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight")


def mtp_rules(
    layer_rules: Rules,
    hf_prefix: str,
    names: tuple[str, str, str, str],
    projection: Layout = "copy",
    *,
    layer_prefix: str | None = None,
) -> Rules:
    """The table of the multi-token-prediction layers.

    Args:
        layer_rules: rules of a decoder layer; the prediction layer contains one.
        hf_prefix: prefix of the layer's Hugging Face names.
        names: Hugging Face names of enorm, hnorm, eh_proj and final_layernorm.
        projection: layout of eh_proj; Megatron's columns are [embedding | hidden state].
        layer_prefix: prefix of the names of ``layer_rules``, if not ``hf_prefix``.
    """
    own, inner = "mtp.layers.{mtp}.", hf_prefix if layer_prefix is None else layer_prefix
    enorm, hnorm, eh_proj, final = (hf_prefix + name for name in names)
    rules = [
        Rule(f"{own}enorm.weight", (enorm,)),
        Rule(f"{own}hnorm.weight", (hnorm,)),
        Rule(f"{own}eh_proj.weight", (eh_proj,), projection, "column"),
        Rule(f"{own}final_layernorm.weight", (final,)),
    ]
    for rule in layer_rules:
        if rule.megatron.startswith(_LAYER):  # not the embedding and the head, which are the decoder's
            megatron = f"{own}transformer_layer." + rule.megatron.removeprefix(_LAYER)
            hf = tuple(inner + name.removeprefix(_HF_LAYER) for name in rule.hf)
            stacked = None if rule.stacked is None else inner + rule.stacked.removeprefix(_HF_LAYER)
            rules.append(replace(rule, megatron=megatron, hf=hf, stacked=stacked))
    return tuple(rules)


# The vision tower of Qwen's models is the module of transformers: every tensor is a copy that all tensor-parallel ranks
# hold. ``{layer}`` counts its blocks, or its mergers.
def _tower(*names: str) -> Rules:
    return tuple(
        Rule(f"vision_model.{name}.{kind}", (f"model.visual.{name}.{kind}",))
        for name in names
        for kind in ("weight", "bias")
    )


_BLOCK = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
_MERGER = ("norm", "linear_fc1", "linear_fc2")

VISION_TOWER = (
    *_tower("patch_embed.proj"),
    Rule("vision_model.pos_embed.weight", ("model.visual.pos_embed.weight",)),
    *_tower(*(f"blocks.{{layer}}.{name}" for name in _BLOCK)),
    *_tower(*(f"merger.{name}" for name in _MERGER)),
)

# DeepStack: features for the first decoder layers, from blocks in the middle of the tower.
DEEPSTACK_MERGERS = _tower(*(f"deepstack_merger_list.{{layer}}.{name}" for name in _MERGER))


def in_language_model(rules: Rules) -> Rules:
    """The same tensors in a vision-language model, whose names begin with ``model.language_model``."""

    def prefixed(name: str) -> str:
        return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name

    return tuple(
        replace(
            rule,
            hf=tuple(map(prefixed, rule.hf)),
            stacked=None if rule.stacked is None else prefixed(rule.stacked),
        )
        for rule in rules
    )


Switch = bool | str
"""True or False for all models of a family, or the boolean field of config.json that decides."""


@dataclass(frozen=True)
class Family:
    """One Hugging Face ``model_type``.

    Attributes:
        rules: the tensor table. A rule is not used if a model lacks its Megatron tensor (a tied output layer, the dense
            MLP in a layer of experts).
        models: released models, for the docs.
        particulars: differences from Llama's architecture, for the docs.
        routing: scores of the expert router. None for a family without experts. ``sigmoid`` means DeepSeek's router:
            a bias takes part in the choice of experts, and the first layers are dense.
        expert_width: the config field with the width of an expert.
        has_shared_gate: a sigmoid gate multiplies the output of the shared expert.
        has_qk_norm: queries and keys are normalized, per head unless ``special_layers`` has joint_qk_norm.
        has_qkv_bias: query, key and value projections have a bias.
        has_output_gate: a sigmoid gate, computed with the queries, multiplies the output of full attention.
        has_zero_centered_norms: norms multiply by 1 + weight.
        is_rotary_interleaved: rope rotates adjacent columns, not halves.
        is_mla: multi-latent attention.
        is_sparse: an indexer chooses the keys that a query attends to.
        has_delta_nets: layers are gated delta nets unless the config declares full attention.
        special_layers: changes of Megatron's decoder layers. Each is a key of ``layer_specs.SPECIAL_LAYERS``, or
            ``module:function``, which is called with a layer's spec and the transformer config.
        vision_tower: ``model_type`` of the vision tower in transformers.
        spec: module of ``--spec`` whose layers are those of the family. Such a flag has no effect.
        vision_spec: the same for the model with its vision tower, which is then built.
        rope_types: ``rope_type`` values that are supported.
        defaults: values of config fields that a config.json may omit, from the family's config class.
        refuses: config fields that must be falsy, as (field, the feature it would enable).
        ignored: regular expressions of Hugging Face names that need not be read: tensors of the multi-token-prediction
            layers if those are not built. ``{num_layers}`` is the decoder's number of layers.
        untouched: regular expressions of names that are never read, because that part of the model is not built.
    """

    model_type: str
    rules: Rules
    models: str = ""
    particulars: str = ""
    routing: Literal["softmax", "sigmoid"] | None = None
    expert_width: str = "moe_intermediate_size"
    has_shared_gate: bool = False
    has_qk_norm: Switch = False
    has_qkv_bias: Switch = False
    has_output_gate: bool = False
    has_zero_centered_norms: bool = False
    is_rotary_interleaved: bool = False
    is_mla: bool = False
    is_sparse: bool = False
    has_delta_nets: bool = False
    special_layers: tuple[str, ...] = ()
    vision_tower: str | None = None
    spec: str | None = None
    vision_spec: str | None = None
    rope_types: frozenset[str] = frozenset({"default"})
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()

    @property
    def is_moe(self) -> bool:
        return self.routing is not None

    @property
    def has_post_norms(self) -> bool:
        """Norms after attention and MLP, before the residual stream."""
        return "post_norms" in self.special_layers

    @property
    def has_joint_qk_norm(self) -> bool:
        """One norm over all query heads together, one over all key heads."""
        return "joint_qk_norm" in self.special_layers


NOT_BUILT: dict[str, str] = {
    "qwen3_vl_moe": "its checkpoints hold experts transposed, which no table describes",
}
"""Families that have launch scripts but cannot be trained, and the reason."""


@functools.cache
def families() -> Mapping[str, Family]:
    """Every :class:`Family` of the modules in ``slime.models.families``, by ``model_type``."""
    found: dict[str, Family] = {}
    # Not at the top of this file, which the modules of the families import.
    package = importlib.import_module("slime.models.families")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            # A family that another file imports is seen twice: it must be the same object.
            if isinstance(value, Family) and found.setdefault(value.model_type, value) is not value:
                raise ValueError(f"{module.name}: model_type {value.model_type} has two families.")
    return found


def why_not_built(model_type: object) -> str | None:
    """The reason why ``model_type`` cannot be trained, as the end of a sentence. None if it can."""
    if model_type in families():
        return None
    if isinstance(model_type, str) and model_type in NOT_BUILT:
        return NOT_BUILT[model_type]
    return f"it is unknown; supported are {', '.join(sorted(families()))}"


def is_family_spec(module: str) -> bool:
    """Whether ``--spec MODULE`` names layers that a family has anyway."""
    return any(module == family.spec for family in families().values())


def is_vision_spec(module: str) -> bool:
    """Whether ``--spec MODULE`` names a model with its vision tower."""
    return any(module == family.vision_spec for family in families().values())
