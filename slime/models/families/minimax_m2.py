"""MiniMax-M2: experts in every layer with a sigmoid router and a bias, queries and keys normalized over all heads.

Rope rotates the first ``rotary_dim`` columns of a head.
"""

from slime.models.family import ATTENTION, EMBEDDINGS, JOINT_QK_NORM, MLP_NORM, Family, decoder_line

_MOE = "block_sparse_moe"
_EXPERT = f"{_MOE}.experts.{{expert}}"
_EXPERTS = (
    *MLP_NORM,
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
    models="MiniMax-M2, M2.5",
    particulars="norms over all heads of queries and of keys together, sigmoid router with a bias, rope on half a head",
    rules=EMBEDDINGS + ATTENTION + JOINT_QK_NORM + _EXPERTS,
    routing="sigmoid",
    expert_width="intermediate_size",  # the family has no dense MLP, to which this field usually belongs
    has_qk_norm=True,
    special_layers=("joint_qk_norm",),
    spec="slime_plugins.models.minimax_m2",
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
    },
)
