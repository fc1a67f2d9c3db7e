"""The model of the plan: config.json and the flags, read by the reader that the trainer uses.

Unlike the trainer, the plan also describes models that cannot be trained, and models that are given by flags alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime.config.groups import flag_of
from slime.config.plan.placement import PlanError, number, read
from slime.models.config_json import read_model_config, text_part
from slime.models.cost import num_active, num_parameters, tower_parameters
from slime.models.family import MOST_LAYERS, Family, families, is_vision_spec
from slime.models.hf_shape import sizes_from_config
from slime.models.shape import SHAPE_FLAGS, ModelShape, MoeShape, expand_layer_pattern

_CONFIG_KEYS = {row.dest: row.key for row in SHAPE_FLAGS if row.key is not None}


def read_shape(args: Namespace) -> ModelShape:
    """The shape that the flags and, for flags that are not given, the Hugging Face config describe.

    ``num_mtp_layers`` and ``vision`` are those that the run builds.

    Raises:
        PlanError: a size is missing, or not a number of a model.
    """
    whole = read_model_config(read(args, "hf_checkpoint"))
    text = _with_flags(args, text_part(whole))
    if text.get("num_hidden_layers", 0) > MOST_LAYERS:
        raise PlanError(f"{text['num_hidden_layers']} layers are more than any model has.")
    family = _family(args, str(whole.get("model_type", "unknown")), text)
    text[family.expert_width] = text.get("moe_intermediate_size") or text.get(family.expert_width)
    spec = read(args, "spec")
    with_vision = bool(read(args, "multimodal_keys")) or bool(spec and is_vision_spec(spec[0]))
    config = whole | {"text_config": text} if text_part(whole) is not whole else whole | text
    with_vision = with_vision and isinstance(whole.get("vision_config"), dict)
    shape, problems, missing = sizes_from_config(config, family, with_vision=with_vision)
    if missing:
        flags = [flag_of(dest) for dest, key in _CONFIG_KEYS.items() if key in missing]
        raise PlanError(f"the shape of the model is unknown: give --hf-checkpoint or {', '.join(flags or missing)}.")
    if problems:
        raise PlanError(f"config.json {' It '.join(problems)}")
    moe = None if shape.moe is None else _experts(args, text, shape, shape.moe)
    return replace(shape, moe=moe, num_mtp_layers=number(args, "mtp_num_layers", 0))


def _with_flags(args: Namespace, text: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model, in which flags replace the fields with the same value."""
    given = {key: read(args, dest) for dest, key in _CONFIG_KEYS.items()}
    return dict(text) | {key: value for key, value in given.items() if value is not None}


def _family(args: Namespace, model_type: str, text: dict[str, Any]) -> Family:
    """The family of ``model_type``. An unknown model has the features of its flags and of the usual config fields."""
    known = families().get(model_type)
    if known is not None:
        # FSDP trains models with biases that Megatron's layers lack.
        has_bias = not known.is_mla and bool(text.get("attention_bias"))
        return replace(known, has_qkv_bias=known.has_qkv_bias or has_bias)
    is_mla = text.get("kv_lora_rank") is not None
    if is_mla:
        text.setdefault("q_lora_rank", None)
    return Family(
        model_type=model_type,
        rules=(),
        routing="sigmoid" if text.get("n_routed_experts") or _num_experts(text) else None,
        expert_width="moe_intermediate_size" if text.get("moe_intermediate_size") else "intermediate_size",
        has_shared_gate=bool(read(args, "moe_shared_expert_gate")),
        # A text names the field of config.json that decides.
        has_qk_norm=bool(read(args, "qk_layernorm")) or "use_qk_norm",
        has_qkv_bias=not is_mla and (bool(read(args, "add_qkv_bias")) or "attention_bias"),
        has_output_gate=bool(read(args, "attention_output_gate")),
        is_mla=is_mla,
        special_layers=("post_norms",) if read(args, "post_self_attn_layernorm") else (),
        vision_tower="unknown",
        defaults={
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": not read(args, "untie_embeddings_and_output_weights"),
        },
    )


def _num_experts(text: Mapping[str, Any]) -> Any:
    return text.get("num_experts") or text.get("num_local_experts")


def _experts(args: Namespace, text: Mapping[str, Any], shape: ModelShape, moe: MoeShape) -> MoeShape:
    """Facts that flags and fields of config.json describe differently."""
    shared = read(args, "moe_shared_expert_intermediate_size")
    if shared is None:
        shared = text.get("shared_expert_intermediate_size") or moe.shared_size
    moe = replace(moe, shared_size=shared, has_shared_gate=shape.family.has_shared_gate)
    pattern = read(args, "moe_layer_freq")
    if isinstance(pattern, str | int):
        # 1: every layer has experts.
        pattern = None if pattern in (1, "1") else expand_layer_pattern(str(pattern), shape.num_layers)
    if not pattern:
        return moe
    if len(pattern) != shape.num_layers:
        raise PlanError(f"--moe-layer-freq describes {len(pattern)} layers, the model has {shape.num_layers}.")
    return replace(moe, layers=tuple(bool(int(one)) for one in pattern))


def shape_section(shape: ModelShape, padded_vocab: int) -> dict[str, Any]:
    """The section ``shape`` of the ``--json`` output, whose keys are stable."""
    family, mla, sparse, delta, moe = shape.family, shape.mla, shape.sparse, shape.delta_net, shape.moe
    return {
        "model_type": shape.model_type,
        "num_layers": shape.num_layers,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_hidden_size,
        "heads": shape.num_attention_heads,
        "kv_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "vocab": shape.vocab_size,
        "padded_vocab": padded_vocab,
        "is_tied": shape.is_tied,
        "is_gated": True,
        "has_qk_norm": shape.has_qk_norm,
        "has_joint_qk_norm": family.has_joint_qk_norm,
        "has_qkv_bias": shape.has_qkv_bias,
        "has_linear_bias": False,
        "has_post_norms": shape.has_post_norms,
        "has_output_gate": family.has_output_gate,
        "latent": mla
        and {
            "q_rank": mla.q_lora_rank,
            "kv_rank": mla.kv_lora_rank,
            "nope_dim": mla.qk_head_dim,
            "rope_dim": mla.qk_pos_emb_head_dim,
            "value_dim": mla.v_head_dim,
        },
        "indexer": sparse and {"heads": sparse.num_heads, "head_dim": sparse.head_dim, "layers": sparse.layers},
        "delta_net": delta
        and {
            "key_heads": delta.num_key_heads,
            "value_heads": delta.num_value_heads,
            "key_dim": delta.key_head_dim,
            "value_dim": delta.value_head_dim,
            "kernel": delta.conv_kernel_dim,
            "layers": delta.layers,
        },
        "experts": moe
        and {
            "num": moe.num_experts,
            "top_k": moe.topk,
            "ffn": moe.ffn_hidden_size,
            "shared_ffn": moe.shared_size or 0,
            "has_shared_gate": moe.has_shared_gate,
            "layers": moe.layers,
        },
        "num_mtp_layers": shape.num_mtp_layers,
        "vision_tower": 0 if shape.vision is None else tower_parameters(shape.vision.config),
        "num_parameters": num_parameters(shape),
        "num_active": num_active(shape),
    }
