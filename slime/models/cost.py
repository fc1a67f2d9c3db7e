"""The cost of a model: weights and how ranks share them, activations for the backward pass, FLOPs of a forward pass.

Tests compare the counts of weights with models that megatron-core builds: they are exact.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from slime.models.hf_shape import read_shape
from slime.models.shape import DeltaNetShape, MlaShape, ModelShape, MoeShape, SparseShape
from slime.utils.errors import ConfigError

Split = Literal["all", "tensor", "expert"]
"""all: every rank of the pipeline stage holds it. tensor: split among tensor-parallel ranks. expert: experts are
distributed over expert-parallel ranks, and each is split among expert-tensor-parallel ranks."""


@dataclass(frozen=True)
class Weight:
    """``count`` tensors of ``numel`` numbers each.

    Attributes:
        active: the number of the ``count`` tensors that one token passes through.
        where: embedding (first pipeline stage), layer, head (last stage).
    """

    name: str
    numel: int
    count: int = 1
    active: int = 1
    split: Split = "all"
    where: Literal["embedding", "layer", "head"] = "layer"

    @property
    def total(self) -> int:
        return self.numel * self.count


def num_parameters(shape: ModelShape) -> int:
    """Parameters without padding of the vocabulary, with ``num_mtp_layers`` prediction layers."""
    return sum(weight.total for weight in model_weights(shape))


def num_active(shape: ModelShape) -> int:
    """Parameters that one token passes through, embeddings included: the second number in names like 30B-A3B."""
    return sum(weight.numel * weight.active for weight in model_weights(shape))


def model_weights(shape: ModelShape, *, vocab: int | None = None) -> Iterator[Weight]:
    """Every weight, in the order of the layers.

    Args:
        vocab: rows of embedding and head, if they are padded.
    """
    vocab = vocab or shape.vocab_size
    if shape.vision is not None:
        yield Weight("vision_tower", tower_parameters(shape.vision.config), where="embedding")
    yield Weight("embed_tokens", vocab * shape.hidden_size, split="tensor", where="embedding")
    for layer in range(shape.num_layers):
        yield from layer_weights(shape, layer)
    yield Weight("norm", shape.hidden_size, where="head")
    if not shape.is_tied:
        yield Weight("lm_head", vocab * shape.hidden_size, split="tensor", where="head")
    for _ in range(shape.num_mtp_layers):
        yield from _mtp_weights(shape)


def layer_weights(shape: ModelShape, layer: int) -> Iterator[Weight]:
    """One decoder layer."""
    delta = shape.delta_net if shape.is_delta_net(layer) else None
    yield from _layer_weights(shape, has_experts=shape.has_experts(layer), delta=delta)
    if shape.sparse and shape.mla and shape.sparse.layers[layer]:
        yield from _indexer_weights(shape, shape.mla, shape.sparse)


def _layer_weights(shape: ModelShape, *, has_experts: bool, delta: DeltaNetShape | None = None) -> Iterator[Weight]:
    hidden = shape.hidden_size
    yield Weight("input_layernorm", hidden)
    if delta is not None:
        yield from _delta_weights(hidden, delta)
    else:
        yield from _latent_weights(shape, shape.mla) if shape.mla else _attention_weights(shape)
    if shape.has_post_norms:
        yield Weight("post_self_attn_layernorm", hidden)
        yield Weight("post_mlp_layernorm", hidden)
    yield Weight("post_attention_layernorm", hidden)
    if has_experts and shape.moe is not None:
        yield from _expert_weights(hidden, shape.moe)
    else:
        yield from _mlp_weights(hidden, "mlp", shape.ffn_hidden_size)


def _attention_weights(shape: ModelShape) -> Iterator[Weight]:
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    # The query projection has the gate's columns too.
    query, key = heads * shape.head_dim * (2 if shape.family.has_output_gate else 1), groups * shape.head_dim
    for name, width in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield Weight(name, shape.hidden_size * width, split="tensor")
        if shape.has_qkv_bias:
            yield Weight(f"{name}.bias", width, split="tensor")
    if shape.has_qk_norm:
        is_joint = shape.family.has_joint_qk_norm
        split: Split = "tensor" if is_joint else "all"
        yield Weight("q_norm", (heads if is_joint else 1) * shape.head_dim, split=split)
        yield Weight("k_norm", (groups if is_joint else 1) * shape.head_dim, split=split)
    yield Weight("o_proj", heads * shape.head_dim * shape.hidden_size, split="tensor")


def _delta_weights(hidden: int, delta: DeltaNetShape) -> Iterator[Weight]:
    keys, values = delta.key_width, delta.value_width
    yield Weight("linear_attn.in_proj_qkvz", hidden * 2 * (keys + values), split="tensor")  # q and k, v and z
    yield Weight("linear_attn.in_proj_ba", hidden * 2 * delta.num_value_heads, split="tensor")
    yield Weight("linear_attn.conv1d", (2 * keys + values) * delta.conv_kernel_dim, split="tensor")
    yield Weight("linear_attn.A_log", delta.num_value_heads, split="tensor")
    yield Weight("linear_attn.dt_bias", delta.num_value_heads, split="tensor")
    yield Weight("linear_attn.norm", delta.value_head_dim)
    yield Weight("linear_attn.out_proj", values * hidden, split="tensor")


def _latent_weights(shape: ModelShape, mla: MlaShape) -> Iterator[Weight]:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434)."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    if mla.q_lora_rank is None:
        yield Weight("q_proj", hidden * query, split="tensor")
    else:
        yield Weight("q_a_proj", hidden * mla.q_lora_rank)
        yield Weight("q_a_layernorm", mla.q_lora_rank)
        yield Weight("q_b_proj", mla.q_lora_rank * query, split="tensor")
    yield Weight("kv_a_proj_with_mqa", hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim))
    yield Weight("kv_a_layernorm", mla.kv_lora_rank)
    yield Weight("kv_b_proj", mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim), split="tensor")
    yield Weight("o_proj", heads * mla.v_head_dim * hidden, split="tensor")


def _indexer_weights(shape: ModelShape, mla: MlaShape, sparse: SparseShape) -> Iterator[Weight]:
    yield Weight("indexer.wq_b", (mla.q_lora_rank or 0) * sparse.num_heads * sparse.head_dim)
    yield Weight("indexer.wk", shape.hidden_size * sparse.head_dim)
    yield Weight("indexer.k_norm", 2 * sparse.head_dim)  # weight and bias
    yield Weight("indexer.weights_proj", shape.hidden_size * sparse.num_heads)


def _mlp_weights(hidden: int, prefix: str, ffn: int) -> Iterator[Weight]:
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield Weight(f"{prefix}.{name}", hidden * ffn, split="tensor")


def _expert_weights(hidden: int, moe: MoeShape) -> Iterator[Weight]:
    yield Weight("mlp.gate", moe.num_experts * hidden)  # the bias of sigmoid routers is a buffer, not counted
    yield Weight("mlp.experts", hidden * moe.ffn_hidden_size, 3 * moe.num_experts, 3 * moe.topk, split="expert")
    if moe.shared_size:
        yield from _mlp_weights(hidden, "mlp.shared_experts", moe.shared_size)
    if moe.has_shared_gate:
        yield Weight("mlp.shared_expert_gate", hidden)


def _mtp_weights(shape: ModelShape) -> Iterator[Weight]:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437 section 2.2): two norms, a projection, a layer, a norm.

    Embedding and head are those of the model.
    """
    hidden = shape.hidden_size
    inner = (
        Weight("enorm", hidden),
        Weight("hnorm", hidden),
        Weight("eh_proj", 2 * hidden * hidden, split="tensor"),
        *_layer_weights(shape, has_experts=shape.has_experts(-1)),  # a layer like the decoder's last
        Weight("shared_head.norm", hidden),
    )
    for weight in inner:
        yield replace(weight, where="head")


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of Qwen3-VL's and Qwen3.5's vision towers, from ``vision_config`` of config.json.

    Patches, positions, blocks, and the mergers of adjacent patches. Defaults are those of transformers' config classes.
    """
    hidden, ffn = config.get("hidden_size", 1152), config.get("intermediate_size", 4304)
    merged = hidden * config.get("spatial_merge_size", 2) ** 2
    patch = config.get("in_channels", 3) * config.get("temporal_patch_size", 2) * config.get("patch_size", 16) ** 2
    attention = 4 * hidden * hidden + 4 * hidden  # with biases
    mlp = 2 * hidden * ffn + hidden + ffn
    block = attention + mlp + 4 * hidden  # two norms with biases
    projections = merged * (merged + 1) + (merged + 1) * config.get("out_hidden_size", 3584)
    deep = len(config.get("deepstack_visual_indexes") or ())
    ends = (patch + 1) * hidden + config.get("num_position_embeddings", 2304) * hidden
    norms = 2 * hidden + deep * 2 * merged  # DeepStack's mergers normalize after merging
    return int(ends + config.get("depth", 27) * block + (1 + deep) * projections + norms)


def layer_activations(
    shape: ModelShape, layer: int, width: int, *, tp: int = 1, expert_tp: int = 1, has_sequence_parallel: bool = False
) -> float:
    """Bytes per token that a layer stores for the backward pass (arXiv:2205.05198 section 4), without dropout.

    Args:
        width: bytes per number.
        has_sequence_parallel: also divide the parts that tensor parallelism leaves whole (equation 4).
    """
    sp = tp if has_sequence_parallel else 1
    whole = 4 * shape.hidden_size  # inputs of the two norms and of the two blocks
    if shape.delta_net and shape.is_delta_net(layer):
        inner = _delta_activations(shape.delta_net)
    elif shape.mla:
        inner, compressed = _latent_activations(shape.num_attention_heads, shape.mla)
        whole += compressed  # the down-projections are not divided among tensor-parallel ranks
    else:
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
        inner = 2 * query + 2 * key  # q, k, v and the output, which is also the input of the projection
        inner += query + 2 * key if shape.has_qk_norm else 0  # the projection's output, which the norms read
    if shape.has_post_norms:
        whole += 2 * shape.hidden_size
    extra = 0.0
    if shape.moe and shape.has_experts(layer):
        moe = shape.moe
        # Each token goes to topk experts: its copies, the numbers that their MLPs store, their outputs.
        extra = moe.topk * (2 * shape.hidden_size * expert_tp + _MLP_NUMBERS * moe.ffn_hidden_size) / sp
        inner += _MLP_NUMBERS * (moe.shared_size or 0)
        extra += moe.num_experts * 4 / width / sp  # fp32 scores of the router
    else:
        inner += _MLP_NUMBERS * shape.ffn_hidden_size
    return width * (whole / sp + inner / tp + extra)


_MLP_NUMBERS = 5  # per column: gate, up, SiLU of the gate, up with its offset, their product


def _delta_activations(delta: DeltaNetShape) -> int:
    """With fused kernels: the projections before and after convolution and SiLU, normalized queries and keys per value
    head, the output and its gated norm. Plain torch also stores the matrices of every chunk."""
    return 6 * delta.key_width + 6 * delta.value_width + 2 * delta.num_value_heads * delta.key_head_dim


def _latent_activations(heads: int, mla: MlaShape) -> tuple[int, int]:
    """(numbers that tensor-parallel ranks share, numbers that every rank holds)."""
    head = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    # Values and the output are as wide as keys in the kernel. The projection reads the columns that count.
    inner = heads * (4 * head + mla.v_head_dim)
    return inner, 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) + mla.qk_pos_emb_head_dim


def gathered_keys(shape: ModelShape, layer: int, *, cp: int, tp: int = 1) -> tuple[float, float]:
    """Numbers per token of a rank that context parallelism adds in a layer: (stored for the backward pass, temporary).

    A rank attends with the keys and values of all ranks. The kernel reads a copy of them in which every chunk of a
    segment has its keys in a row: 1 + 1 / (2 cp) times all keys. Latent attention gathers latents and projects them up.
    """
    if cp == 1 or (shape.delta_net and shape.is_delta_net(layer)):
        return 0.0, 0.0
    if shape.mla:
        # kernels have one width: values are padded to that of the keys
        width = shape.num_attention_heads / tp * 2 * (shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim)
        latents = cp * (shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim)
    else:
        width, latents = 2 * -(-shape.num_query_groups // tp) * shape.head_dim, 0
    return width * (cp + 0.5 - 1) + latents, width * cp


ModelDims: TypeAlias = ModelShape | Namespace
"""The sizes that FLOPs depend on. The flat arguments have the names of Megatron's flags."""


def calculate_fwd_flops(seqlens: Sequence[int], args: ModelDims) -> int:
    """FLOPs of one forward pass over packed sequences. A multiply-add counts as two. See :func:`flops_of_length`."""
    return sum(map(flops_of_length(args), seqlens))


def forward_flops(
    lengths: Sequence[int], hf_checkpoint: str, cost: Callable[[Callable[[int], int]], int | None]
) -> float:
    """FLOPs of one forward pass of the model in ``hf_checkpoint``. 0 if they are unknown.

    Args:
        cost: of sequences that share prefixes, given that of a length. None if they share none.
    """
    try:
        flops = _flops_of(hf_checkpoint)
    except ConfigError:  # only transformers knows the model (--train-backend fsdp)
        return 0.0
    shared = cost(flops)
    return float(sum(map(flops, lengths)) if shared is None else shared)


_flops_of = functools.lru_cache(maxsize=8)(lambda path: flops_of_length(read_shape(path)))  # each rollout asks for it


def flops_of_length(dims: ModelDims) -> Callable[[int], int]:
    """The FLOPs of one forward pass over a sequence of length L, as a function of L.

    Every weight in a product that a token passes through costs 2 per token: all of the decoder and of the head, of the
    experts those that a token is sent to. Causal attention costs ``heads (d_qk + d_v)`` per pair of a query and a key,
    and half of the ``L^2`` pairs are masked. Vision towers and prediction layers are not counted. Flat arguments, which
    plugins pass, are priced as a dense decoder.
    """
    if isinstance(dims, ModelShape):
        return _flops_of_shape(dims)
    h, d, heads = dims.hidden_size, dims.kv_channels, dims.num_attention_heads
    per_token = 2 * h * d * (heads + 2 * dims.num_query_groups) + 2 * h * h + 6 * h * dims.ffn_hidden_size
    per_token = dims.num_layers * per_token + 2 * h * dims.vocab_size
    return lambda length: length * per_token + dims.num_layers * 2 * heads * length * length * d


def _flops_of_shape(shape: ModelShape) -> Callable[[int], int]:
    weights = [weight for layer in range(shape.num_layers) for weight in layer_weights(shape, layer)]
    active = sum(weight.numel * weight.active for weight in weights if not weight.name.endswith(_NOT_IN_PRODUCTS))
    per_token = 2 * (active + shape.hidden_size * shape.vocab_size)
    num_attention = shape.num_layers
    if shape.delta_net:
        delta, num_delta = shape.delta_net, sum(shape.delta_net.layers)
        # Per token and head: read the state with the key, add the outer product, read it with the query.
        per_token += num_delta * 6 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
        num_attention -= num_delta
    mla, sparse = shape.mla, shape.sparse
    width = mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim if mla else 2 * shape.head_dim
    per_pair = 2 * num_attention * shape.num_attention_heads * width
    if sparse is None:
        return lambda length: length * per_token + per_pair * length * length // 2
    index = 2 * sum(sparse.layers) * sparse.num_heads * sparse.head_dim  # the indexer compares all pairs

    def flops(length: int) -> int:
        seen = min(length, sparse.topk)
        pairs = seen * length - seen * seen // 2
        return length * per_token + per_pair * pairs + index * length * length // 2

    return flops


_NOT_IN_PRODUCTS = ("norm", ".bias", "A_log", "dt_bias")
