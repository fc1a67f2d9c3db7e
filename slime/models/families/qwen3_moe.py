"""Qwen3 MoE (30B-A3B, 235B-A22B): Qwen3's attention, experts with a softmax router, no shared experts."""

from dataclasses import replace

from slime.models.families.qwen3 import QWEN3
from slime.models.family import EXPERTS

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, 235B-A22B",
    particulars="experts with a softmax router, with or without `norm_topk_prob`; dense layers by `mlp_only_layers`",
    rules=QWEN3.rules + EXPERTS,
    routing="softmax",
    defaults={**QWEN3.defaults, "norm_topk_prob": False, "decoder_sparse_step": 1},
)
