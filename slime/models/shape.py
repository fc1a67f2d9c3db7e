"""The shape of a model as plain values, independent of the names in config.json, and Megatron's flags for them.

``hf_shape`` makes it from config.json. The plan, the rules, the trainer and the FLOPs model read it. The trainer
derives flags that are not given and compares those that are. The plan describes a model by its flags.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from slime.models.family import MOST_LAYERS, Family


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1 rope scaling, as in ``rope_parameters`` of its config.json."""

    factor: float
    low_freq_factor: float  # wavelengths above original length / low_freq_factor are slowed down
    high_freq_factor: float  # those below original length / high_freq_factor are kept
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN rope scaling of multi-latent attention (arXiv 2309.00071), names as in the paper's reference code."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float  # rotations over the original length: faster columns keep their frequency
    beta_slow: float  # slower columns have it divided by ``factor``
    mscale: float  # of the rotated columns
    mscale_all_dim: float  # of all logits


@dataclass(frozen=True)
class MlaShape:
    """Multi-latent attention: ranks of the compressions and widths per head."""

    q_lora_rank: int | None  # None: queries are not compressed
    kv_lora_rank: int
    qk_head_dim: int  # the columns without rope
    qk_pos_emb_head_dim: int  # the columns with rope
    v_head_dim: int


@dataclass(frozen=True)
class SparseShape:
    """Sparse attention (DeepSeek-V3.2, arXiv:2512.02556): the indexer that chooses the keys a query attends to.

    Attributes:
        num_heads, head_dim: of the indexer.
        topk: the number of keys that a query attends to at most.
        is_rope_interleaved: rope rotates adjacent columns of the indexer's heads, not halves.
        layers: for each decoder layer whether it has an indexer. The others use the choice of the last one before them.
    """

    num_heads: int
    head_dim: int
    topk: int
    is_rope_interleaved: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class MoeShape:
    """Mixture of experts.

    Attributes:
        layers: for each decoder layer whether it has experts. The others have the dense MLP.
        shared_size: width of all shared experts together. None without. ``has_shared_gate``: a gate on their output.
        pre_softmax: scores are computed before the top-k choice, so the scores of the chosen experts do not sum to 1.
        num_groups, group_topk: the choice is limited to the best groups of experts; None without groups.
        scaling_factor: of the scores of the chosen experts; None means 1.
    """

    num_experts: int
    layers: tuple[bool, ...]
    ffn_hidden_size: int
    topk: int
    shared_size: int | None
    score_function: str
    pre_softmax: bool
    has_expert_bias: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None
    has_shared_gate: bool = False


@dataclass(frozen=True)
class DeltaNetShape:
    """Gated delta nets (arXiv:2412.06464), which replace attention in the layers whose entry of ``layers`` is true."""

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def key_width(self) -> int:
        """Columns of all keys together. The queries have as many."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class VisionShape:
    """The vision tower, and the tokens that mark images and videos.

    Attributes:
        config: ``vision_config`` of config.json, from which ``transformers`` builds the tower.
        num_deep_layers: number of the first decoder layers to whose output features of the tower are added (DeepStack).
        rope_sections: number of a head's frequencies that rotate with time, with height and with width, alternating.
        image_token, video_token, start_token: ids. A run of the first or the second is one image or frame, after the
            third.
        merge_size: patches along one side that become one token.
    """

    config: Mapping[str, Any]
    num_deep_layers: int
    rope_sections: tuple[int, int, int]
    image_token: int
    video_token: int
    start_token: int
    merge_size: int


@dataclass(frozen=True)
class ModelShape:
    """All sizes and switches of a model: they decide its tensors and its computation."""

    family: Family = field(repr=False)
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_percent: float
    is_tied: bool
    max_position_embeddings: int
    llama3_rope: Llama3Rope | None = None
    yarn_rope: YarnRope | None = None
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_post_norms: bool = False
    is_rotary_interleaved: bool = False
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    sparse: SparseShape | None = None
    delta_net: DeltaNetShape | None = None
    vision: VisionShape | None = None  # also None if the checkpoint has a tower that the run does not build
    num_mtp_layers: int = 0  # those of the checkpoint; the plan puts in those that the run builds

    @property
    def model_type(self) -> str:
        return self.family.model_type

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        # Megatron checkpoints contain them: another value refuses older ones, another name skips the comparison.
        values: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "family"}
        plain = {name: vars(value) if is_dataclass(value) else value for name, value in values.items()}
        return {"model_type": self.model_type, **plain}

    @property
    def kv_channels(self) -> int:
        """Megatron's name of ``head_dim``."""
        return self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    def is_delta_net(self, layer: int) -> bool:
        return self.delta_net is not None and self.delta_net.layers[layer]

    @property
    def num_cached_layers(self) -> int:
        """Layers whose keys and values an engine caches."""
        return self.num_layers - (sum(self.delta_net.layers) if self.delta_net else 0)

    def padded_vocab_size(self, multiple: int) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to a multiple of ``multiple``."""
        return math.ceil(self.vocab_size / multiple) * multiple


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
