"""GLM-5 and GLM-5.2: the architecture of DeepSeek-V3.2. In GLM-5.2, layers may share an indexer."""

from dataclasses import replace

from slime.models.families.deepseek_v32 import DEEPSEEK_V32

GLM5 = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    models="GLM-5, GLM-5.2",
    particulars="as `deepseek_v32`, but layers may share an indexer",
    spec="slime_plugins.models.glm5.glm5",
    defaults={
        **DEEPSEEK_V32.defaults,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
    },
)
