"""GLM-4.7-Flash: the architecture of DeepSeek-V3, with one leading dense layer."""

from dataclasses import replace

from slime.models.families.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    particulars="as `deepseek_v3`",
    defaults={**DEEPSEEK_V3.defaults, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "first_k_dense_replace": 1},
)
