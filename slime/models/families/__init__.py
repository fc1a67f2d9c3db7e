"""The model families: DeepSeek, GLM, MiniMax, Llama, Qwen.

Every :class:`Family` here, and in a file that is added to this folder, is registered. A file may also hold functions of
the family's layers.
"""

from dataclasses import replace

from slime.models.family import (
    ATTENTION,
    DEEPSEEK_MTP,
    DEEPSTACK_MERGERS,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    INDEXER,
    JOINT_QK_NORM,
    MLA,
    MLP_NORM,
    QK_NORM,
    QKV_BIAS,
    QWEN_MTP,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VISION_TOWER,
    Family,
    Rules,
    decoder_line,
    delta_net,
    in_language_model,
    mtp_rules,
    stacked_experts,
)

# ----------------------------------------------------------------------------- DeepSeek and models of its architecture

_DEEPSEEK = MLA + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

# DeepSeek-V3 and R1, and Moonlight, which has the same ``model_type``. In the checkpoint, the multi-token-prediction
# layer follows the decoder's layers.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    models="DeepSeek-V3, R1, Moonlight",
    particulars="latent attention with or without compressed queries, YaRN, groups of experts, shared experts, "
    "prediction layer",
    rules=EMBEDDINGS + _DEEPSEEK + mtp_rules(_DEEPSEEK, "model.layers.{mtp_layer}.", DEEPSEEK_MTP),
    routing="sigmoid",
    has_qk_norm=True,  # Megatron's switch for the norms of the compressed vectors
    is_mla=True,
    rope_types=frozenset({"default", "yarn"}),
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
    },
    refuses=(("attention_bias", "biases in attention"),),
    ignored=(r"model\.layers\.{num_layers}\..*",),  # the prediction layer
)

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", models="Kimi-K2", particulars="as `deepseek_v3`")

# GLM-4.7-Flash: the architecture of DeepSeek-V3, with one leading dense layer.
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    particulars="as `deepseek_v3`",
    defaults={**DEEPSEEK_V3.defaults, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "first_k_dense_replace": 1},
)

# Queries are always compressed: the indexer reads the compressed ones.
_LATENT = tuple(rule for rule in MLA if ".linear_q_proj." not in rule.megatron)

# DeepSeek-V3.2: DeepSeek-V3 with sparse attention, in which an indexer chooses the keys that a query attends to.
# Every tensor-parallel rank holds the whole indexer. Prediction layers are not built.
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    models="DeepSeek-V3.2",
    particulars="`deepseek_v3` with [sparse attention](#sparse-attention)",
    rules=EMBEDDINGS + _LATENT + INDEXER + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS,
    is_sparse=True,
    defaults={
        **DEEPSEEK_V3.defaults,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": False,
    },
    # Checkpoints may have indexers in layers that do not use them. Engines do not read those either.
    untouched=(r"model\.layers\.\d+\.self_attn\.indexer\..*",),
)

# GLM-5 and GLM-5.2: the architecture of DeepSeek-V3.2. In GLM-5.2, layers may share an indexer.
GLM5 = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    models="GLM-5, GLM-5.2",
    particulars="as `deepseek_v32`, but layers may share an indexer",
    spec="slime_plugins.models.glm5.glm5",
    defaults={
        **DEEPSEEK_V32.defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
    },
)

# ---------------------------------------------------------------------------------------------------- GLM-4 to GLM-4.7

_GLM4_MLP = (
    decoder_line("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", layout="gate_up", split="column"),
    decoder_line("mlp.linear_fc2.weight", "mlp.down_proj.weight", split="row"),
)
_POST_NORMS = (
    decoder_line("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
    decoder_line("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
)

# GLM-4 and GLM-Z1, dense (9B, 32B of April 2025): norms after attention and MLP, interleaved rope on half a head.
GLM4 = Family(
    model_type="glm4",
    models="GLM-4-0414, GLM-Z1, dense",
    particulars="norms after attention and MLP, interleaved rope on half a head",
    rules=EMBEDDINGS + ATTENTION + QKV_BIAS + MLP_NORM + _GLM4_MLP + _POST_NORMS,
    has_qkv_bias="attention_bias",
    is_rotary_interleaved=True,
    special_layers=("post_norms",),
    spec="slime_plugins.models.glm4",
    defaults={
        "rms_norm_eps": 1.5625e-07,  # the default of transformers' class, not a typo
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
    },
)

_GLM4_MOE = ATTENTION + QKV_BIAS + QK_NORM + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

# GLM-4.5, 4.6 and 4.7: sigmoid router with a bias, shared experts. In the checkpoint, the multi-token-prediction layer
# follows the decoder's layers. Its embedding and its head are copies of the main ones.
GLM4_MOE = Family(
    model_type="glm4_moe",
    models="GLM-4.5, 4.6, 4.7",
    particulars="sigmoid router with a bias, shared experts, rope on half a head, leading dense layers, prediction "
    "layer",
    rules=EMBEDDINGS + _GLM4_MOE + mtp_rules(_GLM4_MOE, "model.layers.{mtp_layer}.", DEEPSEEK_MTP),
    routing="sigmoid",
    has_qk_norm="use_qk_norm",
    has_qkv_bias="attention_bias",
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    ignored=(r"model\.layers\.{num_layers}\..*",),
)

# ---------------------------------------------------------------------------------------------------------- MiniMax-M2

_MINIMAX_MOE = "block_sparse_moe"
_MINIMAX_EXPERT = f"{_MINIMAX_MOE}.experts.{{expert}}"
_MINIMAX_EXPERTS = (
    *MLP_NORM,
    decoder_line("mlp.router.weight", f"{_MINIMAX_MOE}.gate.weight"),
    decoder_line("mlp.router.expert_bias", f"{_MINIMAX_MOE}.e_score_correction_bias"),
    decoder_line(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        f"{_MINIMAX_EXPERT}.w1.weight",
        f"{_MINIMAX_EXPERT}.w3.weight",
        layout="gate_up",
        split="column",
    ),
    decoder_line("mlp.experts.local_experts.{expert}.linear_fc2.weight", f"{_MINIMAX_EXPERT}.w2.weight", split="row"),
)

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    models="MiniMax-M2, M2.5",
    particulars="norms over all heads of queries and of keys together, sigmoid router with a bias, rope on half a head",
    rules=EMBEDDINGS + ATTENTION + JOINT_QK_NORM + _MINIMAX_EXPERTS,
    routing="sigmoid",
    expert_width="intermediate_size",  # the family has no dense MLP, to which this field usually belongs
    has_qk_norm=True,
    special_layers=("joint_qk_norm",),
    spec="slime_plugins.models.minimax_m2",
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
    },
)

# --------------------------------------------------------------------------------------------------- Llama, Qwen, MiMo

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
