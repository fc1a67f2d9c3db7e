"""Qwen3-Next: three gated delta nets to one layer of full attention, experts and a gated shared expert in every layer.

Queries and keys are normalised per head, attention has an output gate and rope on a quarter of a head, norms are stored
around zero, except that of the delta nets' output. The prediction layer has names of its own.
"""

from __future__ import annotations

from slime.models.tables import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_SHARED_EXPERT,
    QK_NORM,
    Family,
    Rule,
    Section,
    decoder_line,
    mtp_rules,
)

__all__ = ["GATED_ATTENTION", "HYBRID_DEFAULTS", "MTP_NAMES", "QWEN3_NEXT", "delta_net"]

GATED_ATTENTION = (
    decoder_line("input_layernorm.weight", "input_layernorm.weight"),
    decoder_line(
        "self_attention.linear_qkv.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkv"),
        layout="gated_qkv",
        split="column",
    ),
    decoder_line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split="row"),
    *QK_NORM,
)


def delta_net(in_proj: dict[str, tuple[Section, ...]]) -> tuple[Rule, ...]:
    """The table of a gated delta net.

    Args:
        in_proj: Hugging Face name -> what it is made of, of the tensors that the input projection is kept in.
    """

    def by_key_head(megatron: str, tensors: dict[str, tuple[Section, ...]]) -> Rule:
        names = tuple(f"model.layers.{{layer}}.linear_attn.{name}.weight" for name in tensors)
        megatron = f"decoder.layers.{{layer}}.self_attention.{megatron}.weight"
        return Rule(megatron, names, "by_key_head", "column", tuple(tensors.values()))

    return (
        by_key_head("in_proj", in_proj),
        by_key_head("conv1d", {"conv1d": (("q",), ("k",), ("v",))}),
        decoder_line("self_attention.A_log", "linear_attn.A_log", split="column"),
        decoder_line("self_attention.dt_bias", "linear_attn.dt_bias", split="column"),
        decoder_line("self_attention.out_norm.weight", "linear_attn.norm.weight"),
        decoder_line("self_attention.out_proj.weight", "linear_attn.out_proj.weight", split="row"),
    )


MTP_NAMES = {
    "enorm": "pre_fc_norm_embedding.weight",
    "hnorm": "pre_fc_norm_hidden.weight",
    "eh_proj": "fc.weight",  # its columns are [embedding | hidden state] as Megatron's
    "final_layernorm": "norm.weight",
}

HYBRID_DEFAULTS = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}

_MLPS = DENSE_MLP + EXPERTS + GATED_SHARED_EXPERT

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    rules=EMBEDDINGS
    + GATED_ATTENTION
    + delta_net({"in_proj_qkvz": (("q", "k", "v", "z"),), "in_proj_ba": (("b", "a"),)})
    + _MLPS
    + mtp_rules(GATED_ATTENTION + _MLPS, "mtp.", MTP_NAMES, layer_prefix="mtp.layers.{mtp}."),
    has_qk_norm=True,
    has_delta_nets=True,
    has_output_gate=True,
    has_zero_centred_norms=True,
    has_shared_gate=True,
    is_moe=True,
    # the checkpoints have one prediction layer and the config does not say so
    defaults={**HYBRID_DEFAULTS, "num_nextn_predict_layers": 1},
    refuses=(("attention_bias", "biases in attention"),),
    ignored=(r"mtp\..*",),
)
