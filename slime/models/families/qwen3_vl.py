"""Qwen3-VL, dense: the language model of Qwen3 with a vision tower, whose features also join the first layers."""

from dataclasses import replace

from slime.models.families.qwen3 import QWEN3
from slime.models.family import DEEPSTACK_MERGERS, VISION_TOWER, in_language_model

QWEN3_VL = replace(
    QWEN3,
    model_type="qwen3_vl",
    models="Qwen3-VL dense",
    particulars="Qwen3 with a vision tower, rope with three positions, DeepStack; [images](#images)",
    rules=in_language_model(QWEN3.rules) + VISION_TOWER + DEEPSTACK_MERGERS,
    vision_tower="qwen3_vl_vision",
    vision_spec="slime_plugins.models.qwen3_vl",
    defaults={**QWEN3.defaults, "rope_theta": 500000.0},
    refuses=(("attention_bias", "biases in attention"),),
    untouched=(r"model\.visual\..*",),
)
