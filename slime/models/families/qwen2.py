"""Qwen2 and Qwen2.5, dense: biases on the query, key and value projections, gated SiLU MLP."""

from slime.models.family import ATTENTION, DENSE_MLP, EMBEDDINGS, QKV_BIAS, Family

QWEN2 = Family(
    model_type="qwen2",
    models="Qwen2, Qwen2.5",
    particulars="biases on queries, keys, values",
    rules=EMBEDDINGS + ATTENTION + QKV_BIAS + DENSE_MLP,
    has_qkv_bias=True,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("use_sliding_window", "sliding-window attention"),),
)
