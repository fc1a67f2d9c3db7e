"""MiniMax-M2: experts in every layer behind a sigmoid router with a bias, queries and keys normalised over all heads.

The norms' weights are as long as all heads together; tensor-parallel ranks share them like the heads. Rope turns the
first ``rotary_dim`` columns of a head.
"""

from __future__ import annotations

from slime.models.tables import ATTENTION, EMBEDDINGS, Family, decoder_line

__all__ = ["MINIMAX_M2"]

_JOINT_QK_NORM = tuple(
    decoder_line(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", split="column")
    for part in ("q", "k")
)

_MOE = "block_sparse_moe"
_EXPERT = f"{_MOE}.experts.{{expert}}"
_EXPERTS = (
    decoder_line("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    decoder_line("mlp.router.weight", f"{_MOE}.gate.weight"),
    decoder_line("mlp.router.expert_bias", f"{_MOE}.e_score_correction_bias"),
    decoder_line(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        f"{_EXPERT}.w1.weight",
        f"{_EXPERT}.w3.weight",
        layout="gate_up",
        split="column",
    ),
    decoder_line("mlp.experts.local_experts.{expert}.linear_fc2.weight", f"{_EXPERT}.w2.weight", split="row"),
)

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    rules=EMBEDDINGS + ATTENTION + _JOINT_QK_NORM + _EXPERTS,
    has_qk_norm=True,
    has_joint_qk_norm=True,
    is_moe=True,
    expert_width="intermediate_size",
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
    },
)
