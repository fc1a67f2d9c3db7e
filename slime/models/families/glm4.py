"""GLM-4 and the models up to GLM-4.7: grouped-query attention with rope on half a head."""

from slime.models.family import (
    ATTENTION,
    DEEPSEEK_MTP,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    MLP_NORM,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    decoder_line,
    mtp_rules,
)

_MLP = (
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
    rules=EMBEDDINGS + ATTENTION + QKV_BIAS + MLP_NORM + _MLP + _POST_NORMS,
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

_DECODER = ATTENTION + QKV_BIAS + QK_NORM + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

# GLM-4.5, 4.6 and 4.7: sigmoid router with a bias, shared experts. In the checkpoint, the multi-token-prediction layer
# follows the decoder's layers. Its embedding and its head are copies of the main ones.
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
