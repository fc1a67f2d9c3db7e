"""``config.json`` as on the hub, from the facts of a preset. The flags of the preset are compared with it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tools.make_presets import Facts, load_presets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRESETS = {name: preset.facts for name, preset in load_presets().items()}

# Model types of transformers whose layers are those of another name.
_TYPES = {
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

# Value heads of the gated delta nets. No flag has it: the layers take it from the HF config, 32 is the default.
_DELTA_NET_VALUE_HEADS = {("qwen3_5", 1024): 16, ("qwen3_5", 5120): 48}


def hub_config(facts: Facts) -> dict[str, Any]:
    """The keys that describe the shape and the positions."""
    config = {
        "model_type": facts["hf_type"],
        "num_hidden_layers": facts["layers"],
        "hidden_size": facts["hidden"],
        "intermediate_size": facts["ffn"],
        "num_attention_heads": facts["heads"],
        "num_key_value_heads": facts.get("groups", facts["heads"]),
        "vocab_size": facts["vocab"],
        "tie_word_embeddings": facts.get("tied", False),
        "rms_norm_eps": float(facts.get("eps", 1e-5)),
        "hidden_act": "silu",
        "rope_theta": float(facts["rope_base"]),
        "max_position_embeddings": facts.get("max_position", 40960),
        "attention_bias": facts.get("qkv_bias", False) and "mla" not in facts,
    }
    if "rope_share" in facts:
        config["partial_rotary_factor"] = float(facts["rope_share"])
    if facts.get("llama3_scaling"):
        config["rope_scaling"] = {"rope_type": "llama3", "factor": float(facts["rope_factor"]), "low_freq_factor": 1.0}
        config["rope_scaling"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    # the recipe of GLM-4.7-Flash builds its prediction layer, which the preset leaves out
    num_mtp_layers = 1 if facts["hf_type"] == "glm4_moe_lite" else facts.get("mtp_layers", 0)
    if num_mtp_layers:
        config["num_nextn_predict_layers"] = num_mtp_layers
    if (facts["hf_type"], facts["hidden"]) in _DELTA_NET_VALUE_HEADS:
        config["linear_num_value_heads"] = _DELTA_NET_VALUE_HEADS[facts["hf_type"], facts["hidden"]]
    return config | _attention(facts) | _experts(facts) | _vision(facts)


def _attention(facts: Facts) -> dict[str, Any]:
    mla = facts.get("mla")
    if mla is None:
        return {"head_dim": facts.get("head_dim", facts["hidden"] // facts["heads"])}
    keys: dict[str, Any] = {"q_lora_rank": mla.get("q_lora"), "kv_lora_rank": mla["kv_lora"], "v_head_dim": mla["v"]}
    keys |= {"qk_nope_head_dim": mla["nope"], "qk_rope_head_dim": mla["rope"]}
    if float(facts.get("rope_factor", 1)) > 1:
        scaling = {"type": "yarn", "factor": float(facts["rope_factor"]), "mscale": 1.0, "mscale_all_dim": 1.0}
        scaling |= {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
        keys["rope_scaling"] = scaling
    return keys


def _vision(facts: Facts) -> dict[str, Any]:
    sections = {"qwen3_vl": [24, 20, 20], "qwen3_5": [11, 11, 10], "qwen3_5_moe": [11, 11, 10]}.get(facts["hf_type"])
    if sections is None:
        return {}
    return {
        "rope_scaling": {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": True},
        "vision_config": {"depth": 27, "hidden_size": 1152, "spatial_merge_size": 2},
        **{"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652},
    }


def _experts(facts: Facts) -> dict[str, Any]:
    """Each family has different names for the same numbers."""
    moe = facts.get("moe")
    if moe is None:
        return {}
    keys: dict[str, Any] = {"num_experts_per_tok": moe["topk"], "moe_intermediate_size": moe["ffn"]}
    match facts["hf_type"]:
        case "qwen3_moe" | "qwen3_next" | "qwen3_5_moe":
            keys |= {"num_experts": moe["experts"], "norm_topk_prob": True, "decoder_sparse_step": 1}
            keys |= {"mlp_only_layers": [], "shared_expert_intermediate_size": moe.get("shared")}
        case "minimax_m2":
            keys |= {"num_local_experts": moe["experts"], "scoring_func": "sigmoid", "use_qk_norm": True}
        case _:
            keys |= {"n_routed_experts": moe["experts"], "n_shared_experts": moe["shared"] // moe["ffn"]}
            keys |= {"first_k_dense_replace": moe["dense"], "moe_layer_freq": 1, "norm_topk_prob": True}
            keys |= {"n_group": moe.get("groups", 1), "topk_group": moe.get("group_topk", 1)}
            keys |= {"routed_scaling_factor": moe.get("scale", 1.0), "scoring_func": "sigmoid"}
            keys |= {"topk_method": "noaux_tc", "use_qk_norm": facts.get("qk_norm", False)}
    return keys


@functools.cache
def model_of(preset: str) -> PreTrainedModel:
    """The model that transformers builds for a preset, on the meta device: shapes, no memory."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        config = hub_config(PRESETS[preset])
        kind = config.pop("model_type")
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[_TYPES.get(kind, kind)](**config))
