"""All model families, by Hugging Face ``model_type``. To add one: a file with its table, a line here, two tests."""

from __future__ import annotations

from slime.models.families.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2
from slime.models.families.deepseek_v32 import DEEPSEEK_V32, GLM_MOE_DSA
from slime.models.families.glm4 import GLM4
from slime.models.families.glm4_moe import GLM4_MOE
from slime.models.families.llama import LLAMA
from slime.models.families.mimo import MIMO
from slime.models.families.minimax_m2 import MINIMAX_M2
from slime.models.families.qwen2 import QWEN2
from slime.models.families.qwen2_moe import QWEN2_MOE
from slime.models.families.qwen3 import QWEN3
from slime.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from slime.models.families.qwen3_moe import QWEN3_MOE
from slime.models.families.qwen3_next import QWEN3_NEXT
from slime.models.families.qwen3_vl import QWEN3_VL
from slime.models.tables import Family

__all__ = ["FAMILIES", "NOT_BUILT", "why_not_built"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GLM4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GLM_MOE_DSA,
        KIMI_K2,
        LLAMA,
        MIMO,
        MINIMAX_M2,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_VL,
    )
}

NOT_BUILT: dict[str, str] = {
    "qwen3_vl_moe": "its checkpoints hold experts transposed, which no table describes",
}
"""Families that launch scripts exist for, and what each one lacks."""


def why_not_built(model_type: object) -> str | None:
    """What is missing for ``model_type``, as the end of a sentence; None if it builds."""
    if model_type in FAMILIES:
        return None
    if isinstance(model_type, str) and model_type in NOT_BUILT:
        return NOT_BUILT[model_type]
    return f"it is unknown; supported are {', '.join(sorted(FAMILIES))}"
