"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts with a softmax router, a shared expert with a gate."""

from dataclasses import replace

from slime.models.families.qwen2 import QWEN2
from slime.models.family import EXPERTS, GATED_SHARED_EXPERT

QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    particulars="experts, a shared expert with a sigmoid gate",
    rules=QWEN2.rules + EXPERTS + GATED_SHARED_EXPERT,
    routing="softmax",
    has_shared_gate=True,
    defaults={
        **QWEN2.defaults,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 5632,
    },
)
