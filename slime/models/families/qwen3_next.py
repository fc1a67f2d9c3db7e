"""Qwen3-Next: three gated delta nets for each layer of full attention, experts and a gated shared expert per layer.

Queries and keys are normalized per head, attention has an output gate, and rope rotates a quarter of a head. Norms
multiply by 1 + weight, except that of the delta nets' output.
"""

from slime.models.family import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    GATED_ATTENTION,
    GATED_SHARED_EXPERT,
    QWEN_MTP,
    Family,
    delta_net,
    mtp_rules,
)

HYBRID_DEFAULTS = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}

_DELTA_NET = delta_net({"in_proj_qkvz": (("q", "k", "v", "z"),), "in_proj_ba": (("b", "a"),)})
_MLPS = DENSE_MLP + EXPERTS + GATED_SHARED_EXPERT

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    models="Qwen3-Next",
    particulars="[gated delta nets](#gated-delta-nets) and gated attention, rope on a quarter of a head, norms around "
    "zero, gated shared expert, prediction layer",
    rules=EMBEDDINGS
    + GATED_ATTENTION
    + _DELTA_NET
    + _MLPS
    + mtp_rules(GATED_ATTENTION + _MLPS, "mtp.", QWEN_MTP, layer_prefix="mtp.layers.{mtp}."),
    routing="softmax",
    has_shared_gate=True,
    has_qk_norm=True,
    has_output_gate=True,
    has_zero_centered_norms=True,
    has_delta_nets=True,
    spec="slime_plugins.models.qwen3_next",
    # The checkpoints have one prediction layer, but the config does not list it.
    defaults={**HYBRID_DEFAULTS, "num_nextn_predict_layers": 1},
    refuses=(("attention_bias", "biases in attention"),),
    ignored=(r"mtp\..*",),
)
