"""Megatron's flags that describe a model: the field of config.json and the value of the shape for each.

The trainer derives flags that are not given and compares those that are. The plan describes a model by its flags.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.models.config_json import MOST_LAYERS
from slime.models.shape import MlaShape, ModelShape, MoeShape

# The text of a flag is parsed, never evaluated: eval would run any code.
_PATTERN_NODES = (ast.Expression, ast.List, ast.BinOp, ast.Add, ast.Mult, ast.Constant, ast.Load)


def _always(shape: ModelShape) -> bool:
    return True


def _is_gqa(shape: ModelShape) -> bool:
    return shape.mla is None


def _has_dense_layers(shape: ModelShape) -> bool:
    return shape.moe is None or not all(shape.moe.layers)


def _has_yarn(shape: ModelShape) -> bool:
    return shape.yarn_rope is not None  # without it the values have no effect: log(1) is zero


def _moe(read: Callable[[MoeShape], Any]) -> Callable[[ModelShape], Any]:
    """A value of the experts. None if the model has none."""
    return lambda shape: None if shape.moe is None else read(shape.moe)


def _rope_factor(shape: ModelShape) -> float:
    # Launch scripts pass --rotary-scaling-factor for Llama 3 too: it then means the factor of Llama's scaling.
    scaling = shape.yarn_rope or shape.llama3_rope
    return 1.0 if scaling is None else scaling.factor


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value  # messages show --rotary-base as a whole number


@dataclass(frozen=True)
class ShapeFlag:
    """One flag with a value.

    Attributes:
        hf: the field of config.json, as messages name it.
        value: from the shape. None if the model has no such thing.
        is_checked: the models for which a given flag must agree.
        key: the field of config.json that has the same value. None if no single field has it.
        needs: the architecture that the flag belongs to.
    """

    dest: str
    hf: str
    value: Callable[[ModelShape], Any]
    is_checked: Callable[[ModelShape], bool] = _always
    key: str | None = None
    needs: str = "experts"

    @property
    def flag(self) -> str:
        return "--norm-epsilon" if self.dest == "layernorm_epsilon" else "--" + self.dest.replace("_", "-")


def _size(dest: str, key: str, value: Callable[[ModelShape], Any], is_checked: Any = _always) -> ShapeFlag:
    return ShapeFlag(dest, key, value, is_checked, key)


def _mla(dest: str, key: str, read: Callable[[MlaShape], Any]) -> ShapeFlag:
    return ShapeFlag(dest, key, lambda s: s.mla and read(s.mla), key=key, needs="multi-latent attention")


SHAPE_FLAGS = (
    _size("num_layers", "num_hidden_layers", lambda s: s.num_layers),
    _size("hidden_size", "hidden_size", lambda s: s.hidden_size),
    _size("ffn_hidden_size", "intermediate_size", lambda s: s.ffn_hidden_size, _has_dense_layers),
    _size("num_attention_heads", "num_attention_heads", lambda s: s.num_attention_heads),
    _size("num_query_groups", "num_key_value_heads", lambda s: s.num_query_groups),
    _size("kv_channels", "head_dim", lambda s: s.head_dim, _is_gqa),
    _size("vocab_size", "vocab_size", lambda s: s.vocab_size),
    ShapeFlag("normalization", "rms_norm_eps, which means", lambda s: "RMSNorm"),
    ShapeFlag("layernorm_epsilon", "rms_norm_eps", lambda s: s.norm_epsilon),
    ShapeFlag("position_embedding_type", "rope_theta, which means", lambda s: "rope"),
    ShapeFlag("rotary_base", "rope_theta", lambda s: _whole(s.rotary_base)),
    ShapeFlag("rotary_percent", "partial_rotary_factor", lambda s: s.rotary_percent, _is_gqa),
    ShapeFlag("rotary_scaling_factor", "rope scaling factor", _rope_factor),
    ShapeFlag("rope_scaling_factor", "rope scaling factor", _rope_factor),
    ShapeFlag("rope_type", "rope_type", lambda s: "yarn" if _has_yarn(s) else "rope"),
    ShapeFlag("mscale", "mscale", lambda s: s.yarn_rope and s.yarn_rope.mscale, _has_yarn),
    ShapeFlag("mscale_all_dim", "mscale_all_dim", lambda s: s.yarn_rope and s.yarn_rope.mscale_all_dim, _has_yarn),
    _mla("q_lora_rank", "q_lora_rank", lambda mla: mla.q_lora_rank),
    _mla("kv_lora_rank", "kv_lora_rank", lambda mla: mla.kv_lora_rank),
    _mla("qk_head_dim", "qk_nope_head_dim", lambda mla: mla.qk_head_dim),
    _mla("qk_pos_emb_head_dim", "qk_rope_head_dim", lambda mla: mla.qk_pos_emb_head_dim),
    _mla("v_head_dim", "v_head_dim", lambda mla: mla.v_head_dim),
    ShapeFlag("num_experts", "number of experts", _moe(lambda moe: moe.num_experts), key="n_routed_experts"),
    _size("moe_ffn_hidden_size", "moe_intermediate_size", _moe(lambda moe: moe.ffn_hidden_size)),
    ShapeFlag(
        "moe_shared_expert_intermediate_size",
        "width of all shared experts together,",
        _moe(lambda moe: moe.shared_size),
    ),
    _size("moe_router_topk", "num_experts_per_tok", _moe(lambda moe: moe.topk)),
    ShapeFlag("moe_router_score_function", "scoring_func", _moe(lambda moe: moe.score_function)),
)


@dataclass(frozen=True)
class Switch:
    """One flag without a value.

    Attributes:
        absence: the field of config.json, or the part that the model lacks, if ``has`` is false.
    """

    dest: str
    absence: str
    has: Callable[[ModelShape], bool]

    @property
    def flag(self) -> str:
        if self.dest == "layernorm_zero_centered_gamma":
            return "--apply-layernorm-1p"
        return "--" + self.dest.replace("_", "-")


SWITCHES = (
    Switch("qk_layernorm", "queries and keys have no norm", lambda s: s.has_qk_norm),
    # Latent attention has no such projection: a preset that has the flag nevertheless does not contradict the model.
    Switch("add_qkv_bias", "queries, keys and values have no bias", lambda s: s.has_qkv_bias or s.mla is not None),
    Switch("rotary_interleaved", "its rope rotates halves, not neighbors", lambda s: s.is_rotary_interleaved),
    Switch("use_rope_scaling", "it has no llama3 rope scaling", lambda s: s.llama3_rope is not None),
    Switch("untie_embeddings_and_output_weights", "tie_word_embeddings is true", lambda s: not s.is_tied),
    Switch("group_query_attention", "it has multi-latent attention", _is_gqa),
    Switch("multi_latent_attention", "it has no multi-latent attention", lambda s: s.mla is not None),
    Switch("post_self_attn_layernorm", "there is no norm after attention", lambda s: s.has_post_norms),
    Switch("post_mlp_layernorm", "there is no norm after the MLP", lambda s: s.has_post_norms),
    Switch(
        "layernorm_zero_centered_gamma",
        "its norms are not stored around zero",
        lambda s: s.family.has_zero_centered_norms,
    ),
    Switch("freeze_indexer", "there is no indexer of sparse attention", lambda s: s.sparse is not None),
    Switch("attention_output_gate", "its attention has no gate", lambda s: s.family.has_output_gate),
    Switch("use_gated_attention", "its attention has no gate", lambda s: s.family.has_output_gate),
    Switch(
        "moe_shared_expert_gate", "its shared experts have no gate", lambda s: bool(s.moe and s.moe.has_shared_gate)
    ),
    Switch(
        "moe_router_pre_softmax",
        "norm_topk_prob is true, or it has no experts",
        lambda s: bool(s.moe and s.moe.pre_softmax),
    ),
    Switch(
        "moe_router_enable_expert_bias",
        "its router has no bias",
        lambda s: bool(s.moe and s.moe.has_expert_bias),
    ),
)


def expand_layer_pattern(text: str, num_layers: int) -> list[int] | None:
    """``--moe-layer-freq``: ``N`` (each N-th layer, from 0, has experts) or ``[0]*3+[1]*58`` -> one number per layer.

    None if it is neither. Only lists, whole numbers, ``+`` and ``*`` are evaluated.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return None
    if not all(isinstance(node, _PATTERN_NODES) for node in ast.walk(tree)):
        return None
    value = _evaluate(tree.body)
    if isinstance(value, int):
        return [int(layer % value == 0) for layer in range(num_layers)] if value > 0 else None
    if value is None or any(item not in (0, 1) for item in value):
        return None
    return list(value)


def _evaluate(node: ast.expr) -> Any:
    """A list of integers, an integer, or None for a meaningless combination."""
    # The text is user input: without limits, [0]*10**12 would fill the memory.
    match node:
        case ast.Constant(value=value):
            return value if isinstance(value, int) and not isinstance(value, bool) and value <= MOST_LAYERS else None
        case ast.List(elts=items):
            values = [_evaluate(item) for item in items]
            return values if all(isinstance(value, int) for value in values) else None
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            return a + b if isinstance(a, list) and isinstance(b, list) else None
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(a, int) and isinstance(b, list):
                a, b = b, a
            is_repeat = isinstance(a, list) and isinstance(b, int) and len(a) * b <= MOST_LAYERS
            return a * b if is_repeat else None
        case _:
            return None
