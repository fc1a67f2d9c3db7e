"""Llama, Qwen2, Qwen3 and models with their layers: with experts, a prediction layer, or a vision tower."""

from dataclasses import replace

from slime.models.family import (
    ATTENTION,
    DEEPSTACK_MERGERS,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_SHARED_EXPERT,
    QK_NORM,
    QKV_BIAS,
    VISION_TOWER,
    Family,
    in_language_model,
    mtp_rules,
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
