"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention, whose indexer chooses the keys a query sees.

The indexer's rows have the same order on both sides: per head [rope | rest]. All tensor-parallel ranks hold it whole.
Layers that take the choice of a layer before them (GLM-5.2) have none. Prediction layers are not built.
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.families.deepseek_v3 import DEEPSEEK_V3
from slime.models.tables import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    MLA,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    decoder_line,
)

__all__ = ["DEEPSEEK_V32", "GLM_MOE_DSA"]

_INDEXER = tuple(
    decoder_line(f"self_attention.indexer.{name}", f"self_attn.indexer.{name}")
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
)

# Queries are always compressed: the indexer reads them
_LATENT = tuple(rule for rule in MLA if ".linear_q_proj." not in rule.megatron)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    rules=EMBEDDINGS + _LATENT + _INDEXER + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS,
    is_sparse=True,
    defaults={
        **DEEPSEEK_V3.defaults,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": False,
    },
    # A checkpoint may have indexers in layers that do not use them; engines leave those unread as well
    untouched=(r"model\.layers\.\d+\.self_attn\.indexer\..*",),
)

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    defaults={
        **DEEPSEEK_V32.defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
    },
)
