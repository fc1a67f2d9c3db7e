"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts behind a softmax router, a shared expert with a gate."""

from __future__ import annotations

from slime.models.tables import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_SHARED_EXPERT,
    QKV_BIAS,
    Family,
)

__all__ = ["QWEN2_MOE"]

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    rules=EMBEDDINGS + ATTENTION + QKV_BIAS + DENSE_MLP + EXPERTS + GATED_SHARED_EXPERT,
    has_qkv_bias=True,
    is_moe=True,
    has_shared_gate=True,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 5632,
    },
    refuses=(("use_sliding_window", "sliding-window attention"),),
)
