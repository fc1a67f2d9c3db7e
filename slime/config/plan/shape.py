"""The model as the plan sees it: which weights it has, how many of each, and how ranks share them.

Built from Megatron's argument names. Knows no bytes and no devices: ``memory`` prices what is listed here. Counts are
exact, tests compare them with models that megatron-core builds.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from slime.config.groups import flag_of
from slime.config.plan.layout import PlanError, number, read
from slime.config.plan.vision import tower_parameters
from slime.models.config_json import MOST_LAYERS, indexer_layers, read_model_config, text_part

__all__ = ["DeltaNet", "Experts", "Latent", "Shape", "Split", "Weight", "layer_weights", "model_weights", "read_shape"]

Split = Literal["all", "tensor", "expert"]
"""all: every rank of the stage holds it. tensor: cut among tensor-parallel ranks. expert: experts are dealt out to
expert-parallel ranks, each cut among expert-tensor-parallel ranks."""


@dataclass(frozen=True)
class Weight:
    """``count`` tensors of ``numel`` numbers each.

    Attributes:
        active: how many of the ``count`` one token passes through.
        where: embedding (first pipeline stage), layer, head (last stage).
    """

    name: str
    numel: int
    count: int = 1
    active: int = 1
    split: Split = "all"
    where: Literal["embedding", "layer", "head"] = "layer"


@dataclass(frozen=True)
class Latent:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434): widths per head, and of the compressed streams."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Indexer:
    """What chooses the keys of sparse attention (DeepSeek-V3.2, arXiv:2512.02556), where ``layers[i]`` is true."""

    heads: int
    head_dim: int
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets (arXiv:2412.06464) in the place of attention where ``layers[i]`` is true."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layers: tuple[bool, ...]

    @property
    def keys(self) -> int:
        """Width of all keys together, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Experts:
    """Mixture of experts. ``layers[i]`` says whether layer i has them; the others have the dense MLP."""

    num: int
    top_k: int
    ffn: int
    shared_ffn: int
    has_shared_gate: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class Shape:
    """Everything that decides the number of parameters."""

    model_type: str
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    padded_vocab: int
    is_tied: bool
    is_gated: bool = True
    has_qk_norm: bool = False
    has_joint_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_linear_bias: bool = False
    has_post_norms: bool = False
    has_output_gate: bool = False
    latent: Latent | None = None
    indexer: Indexer | None = None
    delta_net: DeltaNet | None = None
    experts: Experts | None = None
    num_mtp_layers: int = 0
    vision_tower: int = 0
    """Its number of parameters; 0 without."""

    def is_expert_layer(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def is_delta_layer(self, layer: int) -> bool:
        return self.delta_net is not None and self.delta_net.layers[layer]

    @property
    def num_cached_layers(self) -> int:
        """Layers of which an engine keeps keys and values."""
        return self.num_layers - (sum(self.delta_net.layers) if self.delta_net else 0)

    @property
    def num_parameters(self) -> int:
        """As in the checkpoint: the vocabulary without padding, multi-token-prediction layers if there are any."""
        return sum(weight.numel * weight.count for weight in model_weights(self))

    @property
    def num_active(self) -> int:
        """Parameters that one token passes through, embeddings included: the second figure in names like 30B-A3B."""
        return sum(weight.numel * weight.active for weight in model_weights(self))


def model_weights(shape: Shape, *, is_padded: bool = False) -> Iterator[Weight]:
    """Every weight, in the order of the layers. ``is_padded``: with Megatron's padding rows of the vocabulary."""
    vocab = shape.padded_vocab if is_padded else shape.vocab
    if shape.vision_tower:
        yield Weight("vision_tower", shape.vision_tower, where="embedding")
    yield Weight("embed_tokens", vocab * shape.hidden, split="tensor", where="embedding")
    for layer in range(shape.num_layers):
        yield from layer_weights(shape, layer)
    yield Weight("norm", shape.hidden, where="head")
    if not shape.is_tied:
        yield Weight("lm_head", vocab * shape.hidden, split="tensor", where="head")
    for _ in range(shape.num_mtp_layers):
        yield from _mtp_weights(shape)


def layer_weights(shape: Shape, layer: int) -> Iterator[Weight]:
    """One decoder layer."""
    delta = shape.delta_net if shape.is_delta_layer(layer) else None
    yield from _layer_weights(shape, is_expert_layer=shape.is_expert_layer(layer), delta=delta)
    if shape.indexer and shape.latent and shape.indexer.layers[layer]:
        yield from _indexer_weights(shape, shape.latent, shape.indexer)


def _layer_weights(shape: Shape, *, is_expert_layer: bool, delta: DeltaNet | None = None) -> Iterator[Weight]:
    yield Weight("input_layernorm", shape.hidden)
    if delta is not None:
        yield from _delta_weights(shape, delta)
    else:
        yield from _latent_weights(shape, shape.latent) if shape.latent else _attention_weights(shape)
    if shape.has_post_norms:
        yield Weight("post_self_attn_layernorm", shape.hidden)
        yield Weight("post_mlp_layernorm", shape.hidden)
    yield Weight("post_attention_layernorm", shape.hidden)
    if is_expert_layer and shape.experts is not None:
        yield from _expert_weights(shape, shape.experts)
    else:
        yield from _mlp_weights(shape, "mlp", shape.ffn)


def _attention_weights(shape: Shape) -> Iterator[Weight]:
    query = shape.heads * shape.head_dim * (2 if shape.has_output_gate else 1)
    key = shape.kv_heads * shape.head_dim
    for name, width in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield Weight(name, shape.hidden * width, split="tensor")
        if shape.has_qkv_bias or shape.has_linear_bias:
            yield Weight(f"{name}.bias", width, split="tensor")
    if shape.has_qk_norm:
        heads, kv_heads = (shape.heads, shape.kv_heads) if shape.has_joint_qk_norm else (1, 1)
        split: Split = "tensor" if shape.has_joint_qk_norm else "all"
        yield Weight("q_norm", heads * shape.head_dim, split=split)
        yield Weight("k_norm", kv_heads * shape.head_dim, split=split)
    yield Weight("o_proj", shape.heads * shape.head_dim * shape.hidden, split="tensor")
    if shape.has_linear_bias:
        yield Weight("o_proj.bias", shape.hidden)


def _delta_weights(shape: Shape, delta: DeltaNet) -> Iterator[Weight]:
    yield Weight("linear_attn.in_proj_qkvz", shape.hidden * 2 * (delta.keys + delta.values), split="tensor")
    yield Weight("linear_attn.in_proj_ba", shape.hidden * 2 * delta.value_heads, split="tensor")
    yield Weight("linear_attn.conv1d", (2 * delta.keys + delta.values) * delta.kernel, split="tensor")
    yield Weight("linear_attn.A_log", delta.value_heads, split="tensor")
    yield Weight("linear_attn.dt_bias", delta.value_heads, split="tensor")
    yield Weight("linear_attn.norm", delta.value_dim)
    yield Weight("linear_attn.out_proj", delta.values * shape.hidden, split="tensor")


def _latent_weights(shape: Shape, latent: Latent) -> Iterator[Weight]:
    query = shape.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        yield Weight("q_proj", shape.hidden * query, split="tensor")
    else:
        yield Weight("q_a_proj", shape.hidden * latent.q_rank)
        yield Weight("q_a_layernorm", latent.q_rank)
        yield Weight("q_b_proj", latent.q_rank * query, split="tensor")
    yield Weight("kv_a_proj_with_mqa", shape.hidden * (latent.kv_rank + latent.rope_dim))
    yield Weight("kv_a_layernorm", latent.kv_rank)
    yield Weight("kv_b_proj", latent.kv_rank * shape.heads * (latent.nope_dim + latent.value_dim), split="tensor")
    yield Weight("o_proj", shape.heads * latent.value_dim * shape.hidden, split="tensor")


def _indexer_weights(shape: Shape, latent: Latent, indexer: Indexer) -> Iterator[Weight]:
    yield Weight("indexer.wq_b", (latent.q_rank or 0) * indexer.heads * indexer.head_dim)
    yield Weight("indexer.wk", shape.hidden * indexer.head_dim)
    yield Weight("indexer.k_norm", 2 * indexer.head_dim)
    yield Weight("indexer.weights_proj", shape.hidden * indexer.heads)


def _mlp_weights(shape: Shape, prefix: str, ffn: int) -> Iterator[Weight]:
    for name in ("gate_proj", "up_proj") if shape.is_gated else ("up_proj",):
        yield Weight(f"{prefix}.{name}", shape.hidden * ffn, split="tensor")
        if shape.has_linear_bias:
            yield Weight(f"{prefix}.{name}.bias", ffn, split="tensor")
    yield Weight(f"{prefix}.down_proj", ffn * shape.hidden, split="tensor")
    if shape.has_linear_bias:
        yield Weight(f"{prefix}.down_proj.bias", shape.hidden)


def _expert_weights(shape: Shape, experts: Experts) -> Iterator[Weight]:
    yield Weight("mlp.gate", experts.num * shape.hidden)
    matrices = 3 if shape.is_gated else 2
    yield Weight(
        "mlp.experts", shape.hidden * experts.ffn, matrices * experts.num, matrices * experts.top_k, split="expert"
    )
    if experts.shared_ffn:
        yield from _mlp_weights(shape, "mlp.shared_experts", experts.shared_ffn)
    if experts.has_shared_gate:
        yield Weight("mlp.shared_expert_gate", shape.hidden)


def _mtp_weights(shape: Shape) -> Iterator[Weight]:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 section 2.2): two norms, a projection, a layer, a norm.

    The embedding and the head are the model's own.
    """
    last_is_expert = shape.experts is not None and shape.experts.layers[-1]
    inner = (
        Weight("enorm", shape.hidden),
        Weight("hnorm", shape.hidden),
        Weight("eh_proj", 2 * shape.hidden * shape.hidden, split="tensor"),
        *_layer_weights(shape, is_expert_layer=last_is_expert),
        Weight("shared_head.norm", shape.hidden),
    )
    for weight in inner:
        yield Weight(weight.name, weight.numel, weight.count, weight.active, weight.split, "head")


# Megatron's argument -> where config.json of a Hugging Face checkpoint has it. Resolved arguments have it all; this is
# for models that the trainer cannot build, so that their size is shown beside the problem.
_HF_KEYS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("intermediate_size", "moe_intermediate_size"),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
_MOST = 2**40
_INDEXER_HEADS = {"deepseek_v32": 64, "glm_moe_dsa": 32}
"""Models with sparse attention, and the heads of their indexer if config.json does not say."""
_HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_QK_NORM = ("qwen3", "qwen3_moe", "minimax_m2", *_HYBRID)
_QKV_BIAS = ("qwen2", "qwen2_moe", "mimo")
_SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")


def read_shape(args: Namespace) -> Shape:
    """The shape that the flags and, for what they leave open, the Hugging Face config describe.

    Raises:
        PlanError: a field is known to neither, or the model has layers that this formula does not cover.
    """
    config = _hf_config(args)
    model_type = str(config.get("model_type", "unknown"))
    values = {name: _first(read(args, name), config, keys) for name, keys in _HF_KEYS.items()}
    _require(values, "the model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    if values["num_layers"] > MOST_LAYERS:
        raise PlanError(f"{values['num_layers']} layers are more than any model has.")
    heads, tied = values["num_attention_heads"], config.get("tie_word_embeddings")
    step = number(args, "make_vocab_size_divisible_by", 128) * number(args, "tensor_model_parallel_size", 1)
    return Shape(
        model_type=model_type,
        num_layers=values["num_layers"],
        hidden=values["hidden_size"],
        ffn=values["ffn_hidden_size"],
        heads=heads,
        kv_heads=values["num_query_groups"] or heads,
        head_dim=values["kv_channels"] or values["hidden_size"] // heads,
        vocab=values["vocab_size"],
        padded_vocab=read(args, "padded_vocab_size") or math.ceil(values["vocab_size"] / step) * step,
        is_tied=bool(tied) if tied is not None else not read(args, "untie_embeddings_and_output_weights"),
        has_qk_norm=bool(read(args, "qk_layernorm")) or model_type in _QK_NORM or bool(config.get("use_qk_norm")),
        has_joint_qk_norm=model_type == "minimax_m2",
        has_qkv_bias=_has_qkv_bias(args, config, model_type),
        has_post_norms=model_type == "glm4" or bool(read(args, "post_self_attn_layernorm")),
        has_output_gate=bool(read(args, "attention_output_gate")) or model_type in _HYBRID,
        latent=_latent(values),
        indexer=_indexer(config, model_type, values["num_layers"]),
        delta_net=_delta_net(config, values["num_layers"]) if model_type in _HYBRID else None,
        experts=_experts(args, config, values),
        num_mtp_layers=number(args, "mtp_num_layers", 0),
        vision_tower=_vision_tower(args),
    )


def _vision_tower(args: Namespace) -> int:
    """Built for runs with images only."""
    config = read_model_config(read(args, "hf_checkpoint")).get("vision_config")
    return tower_parameters(config) if read(args, "multimodal_keys") and isinstance(config, dict) else 0


def _require(values: dict[str, Any], what: str, *names: str) -> None:
    missing = [name for name in names if values[name] is None]
    if missing:
        flags = ", ".join(map(flag_of, missing))
        raise PlanError(f"the shape of {what} is unknown: give --hf-checkpoint or {flags}.")


def _has_qkv_bias(args: Namespace, config: dict[str, Any], model_type: str) -> bool:
    if read(args, "add_qkv_bias"):
        return True
    return bool(config.get("attention_bias", model_type in _QKV_BIAS)) and not config.get("kv_lora_rank")


def _latent(values: dict[str, Any]) -> Latent | None:
    if values["kv_lora_rank"] is None:
        return None
    _require(values, "multi-latent attention", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return Latent(
        q_rank=values["q_lora_rank"],
        kv_rank=values["kv_lora_rank"],
        nope_dim=values["qk_head_dim"],
        rope_dim=values["qk_pos_emb_head_dim"],
        value_dim=values["v_head_dim"],
    )


def _indexer(config: dict[str, Any], model_type: str, num_layers: int) -> Indexer | None:
    """No flag says any of it."""
    if model_type not in _INDEXER_HEADS:
        return None
    return Indexer(
        heads=config.get("index_n_heads", _INDEXER_HEADS[model_type]),
        head_dim=config.get("index_head_dim", 128),
        layers=indexer_layers(config, num_layers),
    )


def _delta_net(config: dict[str, Any], num_layers: int) -> DeltaNet:
    """No flag says any of it; what config.json leaves out is as in the config classes of transformers."""
    kinds, interval = config.get("layer_types"), config.get("full_attention_interval") or 4
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]
    return DeltaNet(
        key_heads=config.get("linear_num_key_heads", 16),
        value_heads=config.get("linear_num_value_heads", 32),
        key_dim=config.get("linear_key_head_dim", 128),
        value_dim=config.get("linear_value_head_dim", 128),
        kernel=config.get("linear_conv_kernel_dim", 4),
        layers=tuple(kind == "linear_attention" for kind in kinds),
    )


def _experts(args: Namespace, config: dict[str, Any], values: dict[str, Any]) -> Experts | None:
    if not values["num_experts"]:
        return None
    _require(values, "experts", "moe_router_topk")
    ffn = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
    shared = read(args, "moe_shared_expert_intermediate_size")
    if shared is None:
        shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * ffn
    return Experts(
        num=values["num_experts"],
        top_k=values["moe_router_topk"],
        ffn=ffn,
        shared_ffn=shared,
        has_shared_gate=bool(read(args, "moe_shared_expert_gate")) or config.get("model_type") in _SHARED_GATE,
        layers=_expert_layers(args, config, values["num_layers"]),
    )


def _expert_layers(args: Namespace, config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """``--moe-layer-freq``: every N-th layer, or one 0 or 1 per layer; else the checkpoint's first dense layers."""
    pattern = read(args, "moe_layer_freq")
    if isinstance(pattern, list | tuple):
        if len(pattern) != num_layers:
            raise PlanError(f"--moe-layer-freq describes {len(pattern)} layers, the model has {num_layers}.")
        return tuple(bool(item) for item in pattern)
    if isinstance(pattern, int) and pattern > 1:
        return tuple(layer % pattern == 0 for layer in range(num_layers))
    dense = config.get("first_k_dense_replace") or 0
    return tuple(layer >= dense for layer in range(num_layers))


def _first(given: Any, config: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Of the config only sizes count: the checks report anything else."""
    if given is not None:
        return given
    sizes = (config[key] for key in keys if isinstance(config.get(key), int))
    return next((size for size in sizes if 0 < size <= _MOST), None)


def _hf_config(args: Namespace) -> dict[str, Any]:
    """``config.json`` of --hf-checkpoint; empty when there is none (the checks report that)."""
    whole = read_model_config(read(args, "hf_checkpoint"))
    text = text_part(whole)
    if text is whole or not text:
        return text
    outside = {key: whole[key] for key in ("model_type", "tie_word_embeddings") if whole.get(key)}
    return {**text, **outside}
