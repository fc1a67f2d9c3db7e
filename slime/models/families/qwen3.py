"""Qwen3, dense: grouped-query attention with a norm on each query and key head, gated SiLU MLP."""

from slime.models.family import ATTENTION, DENSE_MLP, EMBEDDINGS, QK_NORM, Family

QWEN3 = Family(
    model_type="qwen3",
    models="Qwen3 dense",
    particulars="norms on queries and keys",
    rules=EMBEDDINGS + ATTENTION + QK_NORM + DENSE_MLP,
    has_qk_norm=True,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("attention_bias", "biases in attention"), ("use_sliding_window", "sliding-window attention")),
)
