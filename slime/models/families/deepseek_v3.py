"""DeepSeek-V3 and R1, and Moonlight, which has the same ``model_type``.

Multi-latent attention, leading dense layers, shared experts, and a sigmoid router whose bias takes part only in the
choice of experts. In the checkpoint, the multi-token-prediction layer follows the decoder's layers.
"""

from slime.models.family import (
    DEEPSEEK_MTP,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    MLA,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    mtp_rules,
)

_DECODER = MLA + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

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
