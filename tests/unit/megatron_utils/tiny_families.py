"""One tiny random ``transformers`` model per family, and the model that we build from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slime.models.family import families
from slime.utils.accelerator import allow_torchvision_on_cpu
from tests.unit.megatron_utils.tiny_trainer import VOCAB

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SIGMOID = {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # the norm after the delta rule amplifies the rounding of small outputs, the more the smaller this is
    "rms_norm_eps": 1e-2,
}
_GATED_SHARED = {"num_experts": 8, "shared_expert_intermediate_size": 40, **_EXPERTS}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_PATCHES = {"num_position_embeddings": 16, "patch_size": 2}
_TOWER = {"vision_config": _VISION | _PATCHES}
_DEEPSTACK = {"deepstack_visual_indexes": [0]}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_LINEAR, _FULL = "linear_attention", "full_attention"
_INDEXER = {"index_n_heads": 24, "index_head_dim": 16, "index_topk": 12, "num_nextn_predict_layers": 1}
_GROUPED = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}

# class of transformers' config, its settings, model_type in the saved config.json
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2": ("Qwen2Config", {}, "qwen2"),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}, "qwen3"),
    "llama": ("LlamaConfig", {"head_dim": 16}, "llama"),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1], **_EXPERTS},
        "qwen3_moe",
    ),
    "qwen3_moe_unnormalised": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 8, "norm_topk_prob": False, **_EXPERTS},
        "qwen3_moe",
    ),
    "glm4": ("Glm4Config", {"head_dim": 16, "attention_bias": True, "rope_parameters": _GLM_ROPE}, "glm4"),
    "glm4_moe": (
        "Glm4MoeConfig",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": _GLM_ROPE, **_EXPERTS, **_SIGMOID},
        "glm4_moe",
    ),
    "glm4_moe_qk_norm": (
        "Glm4MoeConfig",
        {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "rope_parameters": _GLM_ROPE}
        | _EXPERTS
        | _SIGMOID,
        "glm4_moe",
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_SIGMOID, **_MLA, **_GROUPED, "q_lora_rank": 20, "rope_parameters": _YARN},
        "deepseek_v3",
    ),
    "moonlight": (
        "DeepseekV3Config",
        {**_SIGMOID, **_MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        "deepseek_v3",
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        {**_SIGMOID, **_MLA, "q_lora_rank": 20, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        | {"rope_parameters": _YARN},
        "kimi_k2",
    ),
    # rms_norm_eps stays 1e-6: for the norms inside latent attention transformers takes 1e-6 whatever the config says,
    # Megatron and SGLang take the config's
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**{k: v for k, v in _SIGMOID.items() if k != "first_k_dense_replace"}, **_MLA, "v_head_dim": 24}
        | {"q_lora_rank": 20, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "rms_norm_eps": 1e-6}
        | {"num_nextn_predict_layers": 1},
        "glm4_moe_lite",
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_GATED_SHARED, "mlp_only_layers": [1]}, "qwen2_moe"),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_DELTA, **_GATED_SHARED, "layer_types": [_LINEAR, _FULL, _LINEAR], "mlp_only_layers": [1]},
        "qwen3_next",
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        {**_DELTA, **_TOWER, "layer_types": [_LINEAR, _LINEAR, _FULL], "tie_word_embeddings": True},
        "qwen3_5",
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {**_DELTA, **_TOWER, **_GATED_SHARED, "layer_types": [_LINEAR, _FULL, _LINEAR]},
        "qwen3_5_moe",
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {"head_dim": 16, "rope_parameters": _MROPE, "vision_config": _VISION | _PATCHES | _DEEPSTACK},
        "qwen3_vl",
    ),
    "mimo": ("Qwen2Config", {"num_nextn_predict_layers": 1}, "mimo"),
    # so many heads that no two keys have the score zero: which of them is chosen would be left to the library
    "deepseek_v32": (
        "DeepseekV32Config",
        {**_SIGMOID, **_MLA, **_GROUPED, **_INDEXER, "q_lora_rank": 20, "rope_parameters": _YARN},
        "deepseek_v32",
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {**_SIGMOID, **_MLA, **_INDEXER, "q_lora_rank": 20, "num_experts_per_tok": 2, "v_head_dim": 24}
        | {"rms_norm_eps": 1e-6, "indexer_types": ["full", "full", "shared"]},
        "glm_moe_dsa",
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_parameters": _GLM_ROPE},
        "minimax_m2",
    ),
}


def make_family_checkpoint(kind: str, path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random ``transformers`` model of ``kind``, saved at ``path``. Norms are near 1, other weights far from 0.

    Tensors of a multi-token-prediction layer are added if the family's checkpoints have them. ``transformers``
    itself leaves them out.
    """
    allow_torchvision_on_cpu()
    import transformers

    class_name, settings, model_type = KINDS[kind]
    settings = _BASE | settings | overrides
    auto_class = transformers.AutoModelForCausalLM
    if "vision_config" in settings:
        is_tied = settings.get("tie_word_embeddings", False)
        settings = {"vision_config": settings.pop("vision_config"), "text_config": settings}
        settings["tie_word_embeddings"] = is_tied
        auto_class = transformers.AutoModelForImageTextToText
    config = getattr(transformers, class_name)(**settings)
    torch.manual_seed(5)
    model = auto_class.from_config(config, dtype=dtype, attn_implementation="eager")
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn_like(parameter)
            is_zero_centered = families()[model_type].has_zero_centered_norms and "linear_attn" not in name
            parameter.copy_((not is_zero_centered) + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(path)
    content = json.loads((path / "config.json").read_text())
    content["model_type"] = model_type
    (path / "config.json").write_text(json.dumps(content))
    if families()[model_type].has_delta_nets:
        _as_released(path, config.get_text_config())
    else:
        _add_prediction_layer(model_type, path, config.get_text_config())
    return model.eval()


def _as_released(path: Path, config: Any) -> None:
    """A hybrid model: a prediction layer with full attention. Qwen3.5 has the experts of a layer in one tensor."""
    tensors = load_file(path / "model.safetensors")
    prefix = "model.language_model." if any(".language_model." in name for name in tensors) else "model."
    attention = f"{prefix}layers.{config.layer_types.index(_FULL)}."
    mlp = f"{prefix}layers.{config.num_hidden_layers - 1}."
    is_taken = {attention: (".self_attn.", ".input_layernorm."), mlp: (".mlp.", ".post_attention_layernorm.")}
    for name, value in list(tensors.items()):
        for layer, kinds in is_taken.items():
            if name.startswith(layer) and any(kind in name for kind in kinds):
                tensors["mtp.layers.0." + name.removeprefix(layer)] = 0.15 * torch.randn_like(value)
    like = tensors[f"{prefix}norm.weight"]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.1 * torch.randn_like(like)
    tensors["mtp.fc.weight"] = 0.15 * torch.randn(config.hidden_size, 2 * config.hidden_size, dtype=like.dtype)
    if prefix != "model." and any(".experts." in name for name in tensors):
        for layer in range(config.num_hidden_layers):
            experts = f"{prefix}layers.{layer}.mlp.experts."
            parts = {
                kind: torch.stack([tensors.pop(f"{experts}{i}.{kind}_proj.weight") for i in range(config.num_experts)])
                for kind in ("gate", "up", "down")
            }
            tensors[experts + "gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[experts + "down_proj"] = parts["down"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _add_prediction_layer(model_type: str, path: Path, config: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    last = f"model.layers.{config.num_hidden_layers - 1}."
    hidden = config.hidden_size
    dtype = next(value.dtype for name, value in tensors.items() if name.endswith("norm.weight"))
    match model_type:
        case "mimo":
            own, names = (
                "model.mtp_layers.0.",
                ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
            )
        case "deepseek_v3" | "deepseek_v32" | "glm_moe_dsa" | "kimi_k2" | "glm4_moe" | "glm4_moe_lite":
            own = f"model.layers.{config.num_hidden_layers}."
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        case _:
            return
    layer = {name.replace(last, own): value for name, value in tensors.items() if name.startswith(last)}
    for name, value in layer.items():
        noise = torch.randn_like(value)
        tensors[name] = 1 + 0.1 * noise if "norm" in name else 0.15 * noise
    for name in names:
        shape = (hidden, 2 * hidden) if "proj" in name else (hidden,)
        tensors[f"{own}{name}.weight"] = (0.15 * torch.randn(shape) if "proj" in name else torch.ones(shape)).to(dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def is_left_out(name: str, model_type: str) -> bool:
    """A tensor of the prediction layer or of a vision tower, which the models of the tests do not have."""
    if name.startswith(("mtp.", "model.visual.")) or ".mtp_layers." in name:
        return True
    return families()[model_type].ignored != () and name.startswith(f"model.layers.{_BASE['num_hidden_layers']}.")


def saved_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of one file."""
    return load_file(path / "model.safetensors")


def packed_logits(model: Any, sequences: list[torch.Tensor], *, is_last: bool = True) -> torch.Tensor:
    """Logits of several sequences ``[L_i]`` in a row: ``[sum L_i, VOCAB]``. A rank's part of them with tensor
    parallelism, hidden states on other pipeline stages than the last."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.model.attention import packed_segments

    lengths = [len(sequence) for sequence in sequences]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        tokens = torch.cat(sequences)[None]
        out = model(tokens, positions[None], None, packed_seq_params=packed_segments(starts, max(lengths)))
    if not is_last:
        return out
    return out[0].float() if mpu.get_tensor_model_parallel_world_size() > 1 else out[0, :, :VOCAB].float()
