"""Qwen3-VL, dense: the language model of Qwen3 with a vision tower, whose features also join the first layers."""

from __future__ import annotations

from slime.models.tables import ATTENTION, DENSE_MLP, EMBEDDINGS, QK_NORM, Family
from slime.models.vision_tables import DEEPSTACK_MERGERS, VISION_TOWER, in_language_model

__all__ = ["QWEN3_VL"]

QWEN3_VL = Family(
    model_type="qwen3_vl",
    rules=tuple(map(in_language_model, EMBEDDINGS + ATTENTION + QK_NORM + DENSE_MLP))
    + VISION_TOWER
    + DEEPSTACK_MERGERS,
    has_qk_norm=True,
    vision_tower="qwen3_vl_vision",
    defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "tie_word_embeddings": False},
    refuses=(("attention_bias", "biases in attention"),),
    untouched=(r"model\.visual\..*",),
)
