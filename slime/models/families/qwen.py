"""Llama, Qwen2, Qwen3, Qwen3-Next, Qwen3.5, MiMo: also with experts, delta nets, prediction layers, vision towers."""

from dataclasses import replace

from slime.models.family import (
    ATTENTION,
    DEEPSTACK_MERGERS,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    MLP_NORM,
    QK_NORM,
    QKV_BIAS,
    QWEN_MTP,
    VISION_TOWER,
    Family,
    Rules,
    delta_net,
    in_language_model,
    mtp_rules,
    stacked_experts,
)

# Llama 2 and 3.x: no biases, gated SiLU MLP. Llama 3.1 and later scale low rope frequencies.
LLAMA = Family(
    model_type="llama",
    models="Llama 2, 3.x",
    particulars="Llama 3.1's rope scaling",
    rules=EMBEDDINGS + ATTENTION + DENSE_MLP,
    rope_types=frozenset({"default", "llama3"}),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("attention_bias", "biases in attention"), ("mlp_bias", "biases in the MLP")),
)

# Qwen2 and Qwen2.5, dense: biases on the query, key and value projections, gated SiLU MLP.
QWEN2 = Family(
    model_type="qwen2",
    models="Qwen2, Qwen2.5",
    particulars="biases on queries, keys, values",
    rules=EMBEDDINGS + ATTENTION + QKV_BIAS + DENSE_MLP,
    has_qkv_bias=True,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("use_sliding_window", "sliding-window attention"),),
)

# Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts with a softmax router, a shared expert with a gate.
QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    particulars="experts, a shared expert with a sigmoid gate",
    rules=QWEN2.rules + EXPERTS + GATED_SHARED_EXPERT,
    routing="softmax",
    has_shared_gate=True,
    defaults={
        **QWEN2.defaults,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 5632,
    },
)

_MIMO_MTP = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight")

# MiMo-7B: Qwen2 with a multi-token-prediction layer.
MIMO = replace(
    QWEN2,
    model_type="mimo",
    models="MiMo-7B",
    particulars="Qwen2 with a prediction layer",
    # The columns of MiMo's projection are [hidden state | embedding], Megatron's are [embedding | hidden state].
    rules=QWEN2.rules + mtp_rules(QWEN2.rules, "model.mtp_layers.{mtp}.", _MIMO_MTP, "swapped_columns"),
    ignored=(r"model\.mtp_layers\..*",),
)

# Qwen3, dense: grouped-query attention with a norm on each query and key head, gated SiLU MLP.
QWEN3 = Family(
    model_type="qwen3",
    models="Qwen3 dense",
    particulars="norms on queries and keys",
    rules=EMBEDDINGS + ATTENTION + QK_NORM + DENSE_MLP,
    has_qk_norm=True,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("attention_bias", "biases in attention"), ("use_sliding_window", "sliding-window attention")),
)

# Qwen3 MoE (30B-A3B, 235B-A22B): Qwen3's attention, experts with a softmax router, no shared experts.
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, 235B-A22B",
    particulars="experts with a softmax router, with or without `norm_topk_prob`; dense layers by `mlp_only_layers`",
    rules=QWEN3.rules + EXPERTS,
    routing="softmax",
    defaults={**QWEN3.defaults, "norm_topk_prob": False, "decoder_sparse_step": 1},
)

# Qwen3-VL, dense: the language model of Qwen3 with a vision tower, whose features also join the first layers.
QWEN3_VL = replace(
    QWEN3,
    model_type="qwen3_vl",
    models="Qwen3-VL dense",
    particulars="Qwen3 with a vision tower, rope with three positions, DeepStack; [images](#images)",
    rules=in_language_model(QWEN3.rules) + VISION_TOWER + DEEPSTACK_MERGERS,
    vision_tower="qwen3_vl_vision",
    vision_spec="slime_plugins.models.qwen3_vl",
    defaults={**QWEN3.defaults, "rope_theta": 500000.0},
    refuses=(("attention_bias", "biases in attention"),),
    untouched=(r"model\.visual\..*",),
)

_HYBRID_DEFAULTS = {
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
    defaults={**_HYBRID_DEFAULTS, "num_nextn_predict_layers": 1},
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
    defaults=_HYBRID_DEFAULTS,
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
