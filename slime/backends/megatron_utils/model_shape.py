"""Model flags and the checkpoint's config.json: flags that were left out are derived, flags that contradict are named.

Called by the command line (``resolve_model`` as a step, ``check_against_hf`` as a rule). What the config's fields mean
is ``hf_shape``'s. Imports neither torch nor megatron nor transformers.
"""

from __future__ import annotations

import ast
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.models.config_json import MOST_LAYERS
from slime.models.hf_shape import (
    Llama3Rope,
    MlaShape,
    ModelShape,
    MoeShape,
    YarnRope,
    read_hf_config,
    read_shape,
)
from slime.utils.errors import ConfigError

__all__ = [
    "Llama3Rope",
    "MlaShape",
    "ModelShape",
    "MoeShape",
    "YarnRope",
    "check_against_hf",
    "expand_layer_pattern",
    "padded_vocab_size",
    "read_hf_config",
    "read_shape",
    "resolve_model",
    "shape_or_none",
]

_SEQ_LENGTH = 4096
_PATTERN_NODES = (ast.Expression, ast.List, ast.BinOp, ast.Add, ast.Mult, ast.Constant, ast.Load)


@dataclass(frozen=True)
class _Field:
    """One line of the table: an attribute of the arguments, its flag, the config field, and the shape's value.

    ``value`` returns None where the model has no such thing; ``is_checked`` says for which models a given flag must
    agree.
    """

    dest: str
    flag: str
    hf: str
    value: Callable[[ModelShape], Any]
    is_checked: Callable[[ModelShape], bool] = lambda shape: True


def _is_gqa(shape: ModelShape) -> bool:
    return shape.mla is None


def _has_dense_layers(shape: ModelShape) -> bool:
    return shape.moe is None or not all(shape.moe.layers)


def _moe(name: str) -> Callable[[ModelShape], Any]:
    return lambda shape: None if shape.moe is None else getattr(shape.moe, name)


def _mla(name: str) -> Callable[[ModelShape], Any]:
    return lambda shape: None if shape.mla is None else getattr(shape.mla, name)


def _rope_factor(shape: ModelShape) -> float | None:
    """Launch scripts also pass --rotary-scaling-factor for Llama 3, whose factor it then is."""
    if shape.yarn_rope is not None:
        return shape.yarn_rope.factor
    if shape.llama3_rope is not None:
        return shape.llama3_rope.factor
    return 1.0


def _yarn(name: str) -> Callable[[ModelShape], Any]:
    return lambda shape: None if shape.yarn_rope is None else getattr(shape.yarn_rope, name)


def _has_yarn(shape: ModelShape) -> bool:
    return shape.yarn_rope is not None  # without it the values have no effect: log(1) is zero


_FIELDS = (
    _Field("num_layers", "--num-layers", "num_hidden_layers", lambda s: s.num_layers),
    _Field("hidden_size", "--hidden-size", "hidden_size", lambda s: s.hidden_size),
    _Field("ffn_hidden_size", "--ffn-hidden-size", "intermediate_size", lambda s: s.ffn_hidden_size, _has_dense_layers),
    _Field("num_attention_heads", "--num-attention-heads", "num_attention_heads", lambda s: s.num_attention_heads),
    _Field("num_query_groups", "--num-query-groups", "num_key_value_heads", lambda s: s.num_query_groups),
    _Field("kv_channels", "--kv-channels", "head_dim", lambda s: s.head_dim, _is_gqa),
    _Field("vocab_size", "--vocab-size", "vocab_size", lambda s: s.vocab_size),
    _Field("normalization", "--normalization", "rms_norm_eps, which means", lambda s: "RMSNorm"),
    _Field("layernorm_epsilon", "--norm-epsilon", "rms_norm_eps", lambda s: s.norm_epsilon),
    _Field("position_embedding_type", "--position-embedding-type", "rope_theta, which means", lambda s: "rope"),
    _Field("rotary_base", "--rotary-base", "rope_theta", lambda s: _whole(s.rotary_base)),
    _Field("rotary_percent", "--rotary-percent", "partial_rotary_factor", lambda s: s.rotary_percent, _is_gqa),
    _Field("rotary_scaling_factor", "--rotary-scaling-factor", "rope scaling factor", _rope_factor),
    _Field("rope_scaling_factor", "--rope-scaling-factor", "rope scaling factor", _rope_factor),
    _Field("rope_type", "--rope-type", "rope_type", lambda s: "yarn" if _has_yarn(s) else "rope"),
    _Field("mscale", "--mscale", "mscale", _yarn("mscale"), _has_yarn),
    _Field("mscale_all_dim", "--mscale-all-dim", "mscale_all_dim", _yarn("mscale_all_dim"), _has_yarn),
    _Field("q_lora_rank", "--q-lora-rank", "q_lora_rank", _mla("q_lora_rank")),
    _Field("kv_lora_rank", "--kv-lora-rank", "kv_lora_rank", _mla("kv_lora_rank")),
    _Field("qk_head_dim", "--qk-head-dim", "qk_nope_head_dim", _mla("qk_head_dim")),
    _Field("qk_pos_emb_head_dim", "--qk-pos-emb-head-dim", "qk_rope_head_dim", _mla("qk_pos_emb_head_dim")),
    _Field("v_head_dim", "--v-head-dim", "v_head_dim", _mla("v_head_dim")),
    _Field("num_experts", "--num-experts", "number of experts", _moe("num_experts")),
    _Field("moe_ffn_hidden_size", "--moe-ffn-hidden-size", "moe_intermediate_size", _moe("ffn_hidden_size")),
    _Field(
        "moe_shared_expert_intermediate_size",
        "--moe-shared-expert-intermediate-size",
        "width of all shared experts together,",
        _moe("shared_size"),
    ),
    _Field("moe_router_topk", "--moe-router-topk", "num_experts_per_tok", _moe("topk")),
    _Field("moe_router_score_function", "--moe-router-score-function", "scoring_func", _moe("score_function")),
)

_SWITCHES: tuple[tuple[str, str, Callable[[ModelShape], bool]], ...] = (
    # dest, the config field or what the model lacks, whether the model has it
    ("qk_layernorm", "queries and keys have no norm", lambda s: s.has_qk_norm),
    # latent attention has no such projection; a preset that carries the flag all the same means nothing by it
    ("add_qkv_bias", "queries, keys and values have no bias", lambda s: s.has_qkv_bias or s.mla is not None),
    ("rotary_interleaved", "its rope rotates halves, not neighbours", lambda s: s.is_rotary_interleaved),
    ("use_rope_scaling", "it has no llama3 rope scaling", lambda s: s.llama3_rope is not None),
    ("untie_embeddings_and_output_weights", "tie_word_embeddings is true", lambda s: not s.is_tied),
    ("group_query_attention", "it has multi-latent attention", _is_gqa),
    ("multi_latent_attention", "it has no multi-latent attention", lambda s: s.mla is not None),
    ("post_self_attn_layernorm", "there is no norm behind attention", lambda s: s.has_post_norms),
    ("post_mlp_layernorm", "there is no norm behind the MLP", lambda s: s.has_post_norms),
    (
        "layernorm_zero_centered_gamma",
        "its norms are not stored around zero",
        lambda s: s.family.has_zero_centred_norms,
    ),
    ("freeze_indexer", "there is no indexer of sparse attention", lambda s: s.sparse is not None),
    ("attention_output_gate", "its attention has no gate", lambda s: s.family.has_output_gate),
    ("use_gated_attention", "its attention has no gate", lambda s: s.family.has_output_gate),
    (
        "moe_shared_expert_gate",
        "its shared experts have no gate",
        lambda s: s.moe is not None and s.moe.has_shared_gate,
    ),
    (
        "moe_router_pre_softmax",
        "norm_topk_prob is true, or it has no experts",
        lambda s: s.moe is not None and s.moe.pre_softmax,
    ),
    (
        "moe_router_enable_expert_bias",
        "its router has no bias",
        lambda s: s.moe is not None and s.moe.has_expert_bias,
    ),
)


def resolve_model(args: Namespace) -> None:
    """Fill in every model argument that was not given from ``--hf-checkpoint``, and expand --moe-layer-freq.

    Given ones stay as they are: :func:`check_against_hf` compares them. Does nothing where the config cannot be read or
    the model cannot be trained; the check says so, and generation alone needs none of this.
    """
    shape = shape_or_none(args)
    if shape is None:
        return
    derived: dict[str, Any] = {field.dest: field.value(shape) for field in _FIELDS}
    derived |= {dest: has(shape) for dest, _, has in _SWITCHES}
    derived |= {
        "swiglu": True,
        "add_bias_linear": False,
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "group_query_attention": shape.mla is None and shape.num_query_groups < shape.num_attention_heads,
        "rope_scaling_factor": 8.0 if shape.llama3_rope is None else shape.llama3_rope.factor,
        "rotary_scaling_factor": 1.0 if shape.yarn_rope is None else shape.yarn_rope.factor,
        "mscale": 1.0 if shape.yarn_rope is None else shape.yarn_rope.mscale,
        "mscale_all_dim": 0.0 if shape.yarn_rope is None else shape.yarn_rope.mscale_all_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "seq_length": _SEQ_LENGTH,
    }
    derived |= _derived_routing(shape)
    for dest, value in derived.items():
        if dest not in args.given:
            setattr(args, dest, value)
    if args.moe_layer_freq is not None:  # text, or a list of text from a YAML file
        pattern = args.moe_layer_freq
        text = f"[{','.join(map(str, pattern))}]" if isinstance(pattern, list) else pattern
        layers = expand_layer_pattern(text, shape.num_layers)
        args.moe_layer_freq = pattern if layers is None else layers
    args.padded_vocab_size = padded_vocab_size(args, shape)


def padded_vocab_size(args: Namespace, shape: ModelShape) -> int:
    """Rows of the embedding: --padded-vocab-size, or what divides evenly among the tensor-parallel ranks."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    return shape.padded_vocab_size(max(1, args.make_vocab_size_divisible_by * args.tensor_model_parallel_size))


def check_against_hf(args: Namespace) -> list[str]:
    """Every model flag that contradicts ``--hf-checkpoint``: flag, its value, the config field and its value."""
    if args.hf_checkpoint is None or not (Path(args.hf_checkpoint) / "config.json").is_file():
        return []  # reported with the other missing files
    if args.debug_rollout_only:
        return []  # any model can generate
    try:
        shape = read_shape(args.hf_checkpoint)
    except ConfigError as error:
        return error.problems
    where = f"config.json of --hf-checkpoint {args.hf_checkpoint}"
    return [
        *_different_values(args, shape, where),
        *_different_switches(args, shape, where),
        *_different_routing(args, shape, where),
        *_too_many_mtp_layers(args, shape, where),
        *_bad_vocab_padding(args, shape),
    ]


def expand_layer_pattern(text: str, num_layers: int) -> list[int] | None:
    """``--moe-layer-freq``: ``N`` (each N-th layer, counted from 0, has experts) or ``[0]*3+[1]*58`` -> one per layer.

    Only lists, whole numbers, ``+`` and ``*`` are evaluated. None if it is anything else.
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
    """A list of ints, an int, or None for a combination without meaning. Sizes are bounded: it is user input."""
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


def shape_or_none(args: Namespace) -> ModelShape | None:
    """Of the run's model; None where the config cannot be read: a rule reports that."""
    if args.hf_checkpoint is None:
        return None
    try:
        return read_shape(args.hf_checkpoint)
    except ConfigError:
        return None


def _derived_routing(shape: ModelShape) -> dict[str, Any]:
    """What a given flag is compared with in its own way, because several spellings mean the same."""
    moe = shape.moe
    return {
        "moe_layer_freq": None if moe is None else [int(has_experts) for has_experts in moe.layers],
        "moe_router_num_groups": None if moe is None else moe.num_groups,
        "moe_router_group_topk": None if moe is None else moe.group_topk,
        "moe_router_topk_scaling_factor": None if moe is None else moe.scaling_factor,
    }


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _is_same(given: Any, actual: Any) -> bool:
    if isinstance(given, int | float) and isinstance(actual, int | float):
        return math.isclose(given, actual, rel_tol=1e-6)
    return bool(given == actual)


def _has(shape: ModelShape, dest: str) -> str:
    """Why a field has no value."""
    if dest in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        return "is not used" if shape.mla is not None else "is for multi-latent attention"
    return "is not used" if shape.moe is not None else "is for experts"


def _different_values(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    for field in _FIELDS:
        given = getattr(args, field.dest)
        if field.dest not in args.given or given is None or not field.is_checked(shape):
            continue
        actual = field.value(shape)
        if actual is None:
            why = _has(shape, field.dest)
            yield f"{field.flag} {given} {why}, but model_type {shape.model_type} in {where} has none: drop the flag."
        elif not _is_same(given, actual):
            yield f"{field.flag} {given} differs from {field.hf} {actual} in {where}: drop the flag."


def _different_switches(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    for dest, absence, has in _SWITCHES:
        if dest in args.given and getattr(args, dest) and not has(shape):
            flag = _SPELLINGS.get(dest, "--" + dest.replace("_", "-"))
            yield f"{flag} differs from model_type {shape.model_type} in {where}: {absence} there. Drop the flag."


_SPELLINGS = {"layernorm_zero_centered_gamma": "--apply-layernorm-1p"}


def _different_routing(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    moe = shape.moe
    if moe is None:
        for dest in _derived_routing(shape):
            if dest in args.given and getattr(args, dest) not in (None, 1, "1"):
                yield f"--{dest.replace('_', '-')} is for experts, which model_type {shape.model_type} does not have."
        return
    if "moe_layer_freq" in args.given:
        layers = [int(has_experts) for has_experts in moe.layers]
        if args.moe_layer_freq != layers:
            yield _pattern_problem(args.moe_layer_freq, layers, where)
    for dest, hf, actual in (
        ("moe_router_num_groups", "n_group", moe.num_groups),
        ("moe_router_group_topk", "topk_group", moe.group_topk),
        ("moe_router_topk_scaling_factor", "routed_scaling_factor", moe.scaling_factor),
    ):
        given = getattr(args, dest)
        # one group, or a factor of one, is the same as none
        if dest in args.given and not _is_same(given or 1, actual or 1):
            flag = "--" + dest.replace("_", "-")
            yield f"{flag} {given} differs from {hf} {actual or 1} in {where}: drop the flag."


def _pattern_problem(given: Any, layers: Sequence[int], where: str) -> str:
    if not isinstance(given, list):
        return f"--moe-layer-freq {given} must be a whole number above 0 or a list of 0 and 1 such as [0]*3+[1]*58."
    if len(given) != len(layers):
        return f"--moe-layer-freq has {len(given)} entries, but the model of {where} has {len(layers)} layers."
    first = next(index for index, (a, b) in enumerate(zip(given, layers, strict=True)) if a != b)
    kind = "has experts" if layers[first] else "is dense"
    return f"--moe-layer-freq says {given[first]} for layer {first}, which {kind} in {where}: drop the flag."


def _too_many_mtp_layers(args: Namespace, shape: ModelShape, where: str) -> Iterator[str]:
    if args.mtp_num_layers is not None and not 1 <= args.mtp_num_layers <= shape.num_mtp_layers:
        has = f"has {shape.num_mtp_layers} such layers" if shape.num_mtp_layers else "has no such layers"
        yield f"--mtp-num-layers {args.mtp_num_layers}: {where} {has} (num_nextn_predict_layers)."


def _bad_vocab_padding(args: Namespace, shape: ModelShape) -> Iterator[str]:
    if args.make_vocab_size_divisible_by < 1:
        yield f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by} must be at least 1."
    padded, ranks = args.padded_vocab_size, args.tensor_model_parallel_size
    if "padded_vocab_size" not in args.given or padded is None:
        return
    if padded < shape.vocab_size or padded % max(1, ranks):
        yield (
            f"--padded-vocab-size {padded} must be at least the {shape.vocab_size} tokens of --hf-checkpoint "
            f"{args.hf_checkpoint} and a multiple of --tensor-model-parallel-size {ranks}."
        )
