"""Llama 2 and 3.x: no biases, gated SiLU MLP. Llama 3.1 and later scale low rope frequencies."""

from slime.models.family import ATTENTION, DENSE_MLP, EMBEDDINGS, Family

LLAMA = Family(
    model_type="llama",
    models="Llama 2, 3.x",
    particulars="Llama 3.1's rope scaling",
    rules=EMBEDDINGS + ATTENTION + DENSE_MLP,
    rope_types=frozenset({"default", "llama3"}),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    refuses=(("attention_bias", "biases in attention"), ("mlp_bias", "biases in the MLP")),
)
