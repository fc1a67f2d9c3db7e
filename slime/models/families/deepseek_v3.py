"""DeepSeek-V3 and R1, and what is built like them: Moonlight (the same ``model_type``), Kimi K2, GLM-4.7-Flash.

Multi-latent attention, leading dense layers, shared experts, and a sigmoid router whose bias only takes part in the
choice. The multi-token-prediction layer stands behind the decoder's layers in the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.families.glm4_moe import MTP_NAMES
from slime.models.tables import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    MLA,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    mtp_rules,
)

__all__ = ["DEEPSEEK_V3", "GLM4_MOE_LITE", "KIMI_K2"]

_DECODER = MLA + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    rules=EMBEDDINGS + _DECODER + mtp_rules(_DECODER, "model.layers.{mtp_layer}.", MTP_NAMES),
    has_qk_norm=True,
    is_moe=True,
    is_mla=True,
    rope_types=frozenset({"default", "yarn"}),
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
        "rope_interleave": True,
    },
    refuses=(("attention_bias", "biases in attention"),),
    ignored=(r"model\.layers\.{num_layers}\..*",),
)

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    defaults={**DEEPSEEK_V3.defaults, "rms_norm_eps": 1e-5, "q_lora_rank": 768},
)
