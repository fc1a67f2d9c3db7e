"""GLM-4.5, 4.6 and 4.7: grouped-query attention with rope on half a head, sigmoid router with a bias, shared experts.

In the checkpoint, the multi-token-prediction layer follows the decoder's layers. Its embedding and its head are copies
of the main ones.
"""

from slime.models.family import (
    ATTENTION,
    DEEPSEEK_MTP,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    mtp_rules,
)

_DECODER = ATTENTION + QKV_BIAS + QK_NORM + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

GLM4_MOE = Family(
    model_type="glm4_moe",
    models="GLM-4.5, 4.6, 4.7",
    particulars="sigmoid router with a bias, shared experts, rope on half a head, leading dense layers, prediction "
    "layer",
    rules=EMBEDDINGS + _DECODER + mtp_rules(_DECODER, "model.layers.{mtp_layer}.", DEEPSEEK_MTP),
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
