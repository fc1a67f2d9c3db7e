"""GLM-4 and GLM-Z1, dense (9B, 32B of April 2025): norms after attention and MLP, interleaved rope on half a head."""

from __future__ import annotations

from slime.models.tables import ATTENTION, EMBEDDINGS, POST_NORMS, QKV_BIAS, Family

__all__ = ["GLM4"]

GLM4 = Family(
    model_type="glm4",
    rules=EMBEDDINGS + ATTENTION + QKV_BIAS + POST_NORMS,
    has_qkv_bias=True,
    has_post_norms=True,
    defaults={
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
    },
)
