"""GLM-4 and GLM-Z1, dense (9B, 32B of April 2025): norms after attention and MLP, interleaved rope on half a head."""

from slime.models.family import ATTENTION, EMBEDDINGS, MLP_NORM, QKV_BIAS, Family, decoder_line

_MLP = (
    decoder_line("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", layout="gate_up", split="column"),
    decoder_line("mlp.linear_fc2.weight", "mlp.down_proj.weight", split="row"),
)
_POST_NORMS = (
    decoder_line("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
    decoder_line("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
)

GLM4 = Family(
    model_type="glm4",
    models="GLM-4-0414, GLM-Z1, dense",
    particulars="norms after attention and MLP, interleaved rope on half a head",
    rules=EMBEDDINGS + ATTENTION + QKV_BIAS + MLP_NORM + _MLP + _POST_NORMS,
    has_qkv_bias="attention_bias",
    is_rotary_interleaved=True,
    special_layers=("post_norms",),
    spec="slime_plugins.models.glm4",
    defaults={
        "rms_norm_eps": 1.5625e-07,  # the default of transformers' class, not a typo
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
    },
)
