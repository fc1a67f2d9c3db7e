"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, in which an indexer chooses the keys that a query attends to.

Every tensor-parallel rank holds the whole indexer. Prediction layers are not built.
"""

from dataclasses import replace

from slime.models.families.deepseek_v3 import DEEPSEEK_V3
from slime.models.family import DENSE_MLP, EMBEDDINGS, EXPERTS, INDEXER, MLA, ROUTER_BIAS, SHARED_EXPERTS

# Queries are always compressed: the indexer reads the compressed ones.
_LATENT = tuple(rule for rule in MLA if ".linear_q_proj." not in rule.megatron)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    models="DeepSeek-V3.2",
    particulars="`deepseek_v3` with [sparse attention](#sparse-attention)",
    rules=EMBEDDINGS + _LATENT + INDEXER + DENSE_MLP + EXPERTS + ROUTER_BIAS + SHARED_EXPERTS,
    is_sparse=True,
    defaults={
        **DEEPSEEK_V3.defaults,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": False,
    },
    # Checkpoints may have indexers in layers that do not use them. Engines do not read those either.
    untouched=(r"model\.layers\.\d+\.self_attn\.indexer\..*",),
)
