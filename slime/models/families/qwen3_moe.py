"""Qwen3 MoE (30B-A3B, 235B-A22B): Qwen3's attention, experts behind a softmax router, no shared experts."""

from __future__ import annotations

from slime.models.tables import ATTENTION, DENSE_MLP, EMBEDDINGS, EXPERTS, QK_NORM, Family

__all__ = ["QWEN3_MOE"]

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    rules=EMBEDDINGS + ATTENTION + QK_NORM + DENSE_MLP + EXPERTS,
    has_qk_norm=True,
    is_moe=True,
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    refuses=(("attention_bias", "biases in attention"), ("use_sliding_window", "sliding-window attention")),
)
