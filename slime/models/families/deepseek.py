"""DeepSeek-V3, DeepSeek-V3.2 and models of their architecture.

Multi-latent attention, leading dense layers, shared experts, and a sigmoid router whose bias takes part only in the
choice of experts.
"""

from dataclasses import replace

from slime.models.family import (
    DEEPSEEK_MTP,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    INDEXER,
    MLA,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    mtp_rules,
)

_DECODER = MLA + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

# DeepSeek-V3 and R1, and Moonlight, which has the same ``model_type``. In the checkpoint, the multi-token-prediction
# layer follows the decoder's layers.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    models="DeepSeek-V3, R1, Moonlight",
    particulars="latent attention with or without compressed queries, YaRN, groups of experts, shared experts, "
    "prediction layer",
    rules=EMBEDDINGS + _DECODER + mtp_rules(_DECODER, "model.layers.{mtp_layer}.", DEEPSEEK_MTP),
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
