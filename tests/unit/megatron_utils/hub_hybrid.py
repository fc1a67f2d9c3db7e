"""``config.json`` of released models with gated delta nets, the fields that say something about the shape."""

from __future__ import annotations

from typing import Any

_DELTA_NET = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}

QWEN3_NEXT_80B: dict[str, Any] = _DELTA_NET | {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}

_TEXT = _DELTA_NET | {
    "attention_bias": False,
    "attn_output_gate": True,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}

QWEN35_4B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": _TEXT
    | {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "hidden_size": 1024},
}

QWEN35_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": _TEXT
    | {
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152},
}

HYBRID_MODELS = {
    "qwen3-next-80B-A3B": QWEN3_NEXT_80B,
    "qwen3.5-4B": QWEN35_4B,
    "qwen3.5-35B-A3B": QWEN35_35B,
}
"""By the name of the preset that goes with it."""
