"""Llama 2, 3.x: no biases, gated SiLU MLP; Llama 3.1 and later scale low rope frequencies."""

from __future__ import annotations

from slime.models.tables import ATTENTION, DENSE_MLP, EMBEDDINGS, Family

__all__ = ["LLAMA"]

LLAMA = Family(
    model_type="llama",
    rules=EMBEDDINGS + ATTENTION + DENSE_MLP,
    supports_llama3_rope=True,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("attention_bias", "biases in attention"), ("mlp_bias", "biases in the MLP")),
)
