"""GLM-4.5, 4.6 and 4.7: grouped-query attention with rope on half a head, sigmoid router with a bias, shared experts.

The multi-token-prediction layer stands behind the decoder's layers in the checkpoint. Its copies of the embedding and
of the head are the main ones.
"""

from __future__ import annotations

from slime.models.tables import (
    ATTENTION,
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

__all__ = ["GLM4_MOE", "MTP_NAMES"]

MTP_NAMES = {
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "eh_proj": "eh_proj.weight",
    "final_layernorm": "shared_head.norm.weight",
}

_DECODER = ATTENTION + QKV_BIAS + QK_NORM + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

GLM4_MOE = Family(
    model_type="glm4_moe",
    rules=EMBEDDINGS + _DECODER + mtp_rules(_DECODER, "model.layers.{mtp_layer}.", MTP_NAMES),
    has_qkv_bias=True,
    has_qk_norm=True,
    is_moe=True,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    },
    ignored=(r"model\.layers\.{num_layers}\..*",),
)
