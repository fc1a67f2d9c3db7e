"""Qwen3-Next and Qwen3.5: gated delta nets beside layers of full attention."""

from dataclasses import replace

from slime.models.family import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    MLP_NORM,
    QWEN_MTP,
    VISION_TOWER,
    Family,
    Rules,
    delta_net,
    in_language_model,
    mtp_rules,
    stacked_experts,
)

_DEFAULTS = {
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

_FUSED_DELTA_NET = delta_net({"in_proj_qkvz": (("q", "k", "v", "z"),), "in_proj_ba": (("b", "a"),)})
_MLPS = DENSE_MLP + EXPERTS + GATED_SHARED_EXPERT

# Qwen3-Next: three gated delta nets for each layer of full attention, experts and a gated shared expert per layer.
# Queries and keys are normalized per head, attention has an output gate, and rope rotates a quarter of a head. Norms
# multiply by 1 + weight, except that of the delta nets' output.
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    models="Qwen3-Next",
    particulars="[gated delta nets](#gated-delta-nets) and gated attention, rope on a quarter of a head, norms around "
    "zero, gated shared expert, prediction layer",
    rules=EMBEDDINGS
    + GATED_ATTENTION
    + _FUSED_DELTA_NET
    + _MLPS
    + mtp_rules(GATED_ATTENTION + _MLPS, "mtp.", QWEN_MTP, layer_prefix="mtp.layers.{mtp}."),
    routing="softmax",
    has_shared_gate=True,
    has_qk_norm=True,
    has_output_gate=True,
    has_zero_centered_norms=True,
    has_delta_nets=True,
    spec="slime_plugins.models.qwen3_next",
    # The checkpoints have one prediction layer, but the config does not list it.
    defaults={**_DEFAULTS, "num_nextn_predict_layers": 1},
    refuses=(("attention_bias", "biases in attention"),),
    ignored=(r"mtp\..*",),
)

_DELTA_NET = delta_net(
    {
        "in_proj_qkv": (("q",), ("k",), ("v",)),
        "in_proj_z": (("z",),),
        "in_proj_b": (("b",),),
        "in_proj_a": (("a",),),
    }
)


def _table(mlps: Rules) -> Rules:
    decoder = EMBEDDINGS + GATED_ATTENTION + _DELTA_NET + mlps
    # Names of prediction layers have no prefix of the language model.
    prediction = mtp_rules(GATED_ATTENTION + mlps, "mtp.", QWEN_MTP, layer_prefix="mtp.layers.{mtp}.")
    return in_language_model(decoder) + prediction + VISION_TOWER


# Qwen3.5, dense and with experts: the layers of Qwen3-Next, with separate projections in the delta nets. The
# checkpoints are those of a vision-language model: names have a prefix, and there is a vision tower, which is built for
# runs with images. A checkpoint holds all experts of a layer as one tensor.
QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5",
    models="Qwen3.5 dense",
    particulars="the layers of Qwen3-Next, rope with three positions; [images](#images)",
    rules=_table(DENSE_MLP),
    routing=None,
    has_shared_gate=False,
    vision_tower="qwen3_5_vision",
    spec="slime_plugins.models.qwen3_5",
    vision_spec="slime_plugins.models.qwen3_5_vl",
    defaults=_DEFAULTS,
    untouched=(r"model\.visual\..*",),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    models="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B",
    particulars="as `qwen3_5`, with experts and a gated shared expert",
    rules=_table(MLP_NORM + stacked_experts(EXPERTS) + GATED_SHARED_EXPERT),  # every layer has experts
    routing="softmax",
    has_shared_gate=True,
    vision_tower="qwen3_5_moe_vision",
)
