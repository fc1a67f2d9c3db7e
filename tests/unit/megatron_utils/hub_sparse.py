"""Shape, positions and routing in ``config.json`` of GLM-5, GLM-5.2 and MiniMax-M2."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

GLM5: Config = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}

GLM52: Config = GLM5 | {
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}

MINIMAX_M2: Config = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}

SPARSE_MODELS: dict[str, Config] = {
    "glm5-744B-A40B": GLM5,
    "glm5.2-744B-A40B": GLM52,
    "minimax-m2": MINIMAX_M2,
}
"""By the name of the preset that goes with it."""
