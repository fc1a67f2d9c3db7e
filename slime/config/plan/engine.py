"""Device memory of an inference engine, and the size of a weight sync."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.config.plan.memory import adapter_numbers, num_trainable, precision_of
from slime.config.plan.placement import Layout, number, read, stage_layers
from slime.models.config_json import read_model_config
from slime.models.cost import Weight, layer_weights, model_weights, num_parameters
from slime.models.shape import ModelShape

CPU_TOKENS = 65536
"""Key/value cache of an engine on a CPU. A test compares it with slime.backends.sglang_utils.server_args."""

ASSUMED_FRACTION = 0.85
"""SGLang picks --mem-fraction-static itself when it is not given. This is close to its choice on large devices."""

LINKS = {"NVLink": 450e9, "network": 50e9}
"""Nominal bytes per second that a device receives: NVLink of an H100 in one direction, an adapter of 400 Gb/s."""

_LEAST_BUCKET, _MOST_BUCKET, _BUCKETS = 512 * 1024**2, 2 * 1024**3, 8
"""Bounds of a bucket, and its share of the free device memory. A test compares them with slime.weight_sync.chunks."""

SLOTS = 2
"""Adapters for which an engine has memory: the policy's and none. A test compares it with adapter_flags."""

_ATTENTION = ("q_", "k_", "v_", "o_", "kv_", "linear_attn")


@dataclass(frozen=True)
class EngineMemory:
    """One device of one engine, in bytes.

    Attributes:
        weights: those of the model, and memory for adapters.
        kv_per_token: key/value cache of one token, on this device.
        pool: memory left for that cache, or the part that --sglang-max-total-tokens limits it to.
        tokens: how many fit into the engine, over its data-parallel attention groups. ``sequences`` of the greatest
            length.
    """

    tp: int
    pp: int
    weights: int
    kv_per_token: int
    fraction: float
    is_fraction_assumed: bool
    pool: int
    tokens: int
    max_length: int
    sequences: int


@dataclass(frozen=True)
class WeightSync:
    """The data of one sync: every tensor of the checkpoint, whole, in buckets, or the adapters.

    Attributes:
        base_bytes: with adapters those of the base, which travels in ``buckets`` before the first rollout. Else 0.
        received: bytes that the busiest device gets by each of the ``LINKS``. Empty for files and adapters.
        seconds: the time of these bytes at the nominal speed. Copies and loading in the engines come on top.
    """

    mode: str
    transport: str
    bytes: int
    buckets: int
    buffer_bytes: int
    interval: int
    num_syncs: int | None
    received: dict[str, int]
    seconds: float
    base_bytes: int = 0


def serves_adapter(args: Namespace) -> bool:
    """Whether engines get an adapter. A test compares it with slime.data.engine_fields."""
    return bool(read(args, "lora_rank") and not read(args, "lora_merge") and not read(args, "debug_rollout_only"))


def engine_memory(args: Namespace, shape: ModelShape, device_bytes: int, *, is_cpu: bool = False) -> EngineMemory:
    """Memory of a device of a regular engine. ``is_cpu``: the engine's processes on a CPU, whose cache has a size."""
    pp = number(args, "sglang_pp_size", 1)
    tp = max(1, number(args, "rollout_num_gpus_per_engine", 1) // pp)
    dp = number(args, "sglang_dp_size", 1) if read(args, "sglang_enable_dp_attention") else 1
    attention_tp = max(1, tp // dp)
    width = _weight_bytes(args)
    weights = sum(_on_device(weight, tp, attention_tp) for weight in model_weights(shape)) * width / pp
    if serves_adapter(args):
        ranks = {"tensor_ranks": tp, "expert_ranks": tp}
        numbers = adapter_numbers(args, shape, range(shape.num_layers), **ranks) or (0, 0)
        slots = number(args, "sglang_max_loras_per_batch", SLOTS)
        weights += slots * sum(numbers) * precision_of(args).weights / pp
    # Without the flag the cache has the dtype of the weights.
    kv_width = 1 if str(read(args, "sglang_kv_cache_dtype")).startswith("fp8") else precision_of(args).weights
    per_token = max(1, round(_kv_numbers(shape, attention_tp) * kv_width * shape.num_cached_layers / pp))
    given = read(args, "sglang_mem_fraction_static")
    fraction = ASSUMED_FRACTION if given is None else float(given)
    # The fraction is for weights and cache together.
    pool = max(0, round(fraction * device_bytes - weights))
    limit = read(args, "sglang_max_total_tokens")
    if is_cpu:
        pool = (limit or CPU_TOKENS) * per_token
    elif limit is not None:
        pool = min(pool, int(limit) * per_token)
    # Each data-parallel attention group has a separate cache.
    tokens = pool // per_token * dp
    length = _max_length(args)
    return EngineMemory(
        tp=tp,
        pp=pp,
        weights=round(weights),
        kv_per_token=per_token,
        fraction=fraction,
        is_fraction_assumed=given is None,
        pool=pool,
        tokens=tokens,
        max_length=length,
        sequences=tokens // length,
    )


def _on_device(weight: Weight, tp: int, attention_tp: int) -> float:
    if weight.split == "all":
        return weight.numel * weight.count
    # With data-parallel attention its weights are divided among fewer ranks.
    is_attention = weight.where == "layer" and weight.name.startswith(_ATTENTION)
    return weight.numel * weight.count / (attention_tp if is_attention else tp)


def _kv_numbers(shape: ModelShape, tp: int) -> int:
    """Per token and layer: keys and values of the heads on this device. MLA caches the compressed stream, undivided."""
    if shape.mla:
        return shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim
    # Rounded up: with more ranks than heads each rank holds a copy of a head.
    return 2 * -(-shape.num_query_groups // tp) * shape.head_dim


def _max_length(args: Namespace) -> int:
    for name in ("rollout_max_context_len", "sglang_context_length"):
        if read(args, name):
            return int(read(args, name))
    return number(args, "rollout_max_prompt_len", 0) + number(args, "rollout_max_response_len", 1024)


def _weight_bytes(args: Namespace) -> float:
    """Bytes per weight of the engine: by its flag, or because the checkpoint is quantized."""
    if str(read(args, "sglang_quantization")) == "fp8":
        return 1
    found = read_model_config(read(args, "hf_checkpoint")).get("quantization_config") or {}
    match found.get("quant_method"):
        case "fp8":
            return 1
        case "compressed-tensors":
            groups = (found.get("config_groups") or {}).values()
            bits = [(group.get("weights") or {}).get("num_bits") or 0 for group in groups]
            return max(bits, default=0) / 8 or precision_of(args).weights
        case _:
            return precision_of(args).weights


def weight_sync(
    args: Namespace,
    shape: ModelShape,
    layout: Layout,
    num_rollouts: int | None,
    free: int = 0,
    *,
    is_cpu: bool = False,
) -> WeightSync:
    """One sync of the whole model, or of its adapters, which are one message to each engine.

    Every pipeline stage sends its tensors separately, so buckets are counted per stage.

    Args:
        free: bytes of device memory that are left at the sync.
    """
    width = precision_of(args).weights
    limit = number(args, "update_weight_buffer_size", min(max(free // _BUCKETS, _LEAST_BUCKET), _MOST_BUCKET))
    stages = stage_layers(args, shape.num_layers, layout.pp)
    sizes = [_stage_tensors(shape, layers, stage, layout.pp) for stage, layers in enumerate(stages)]
    interval = number(args, "update_weights_interval", 1)
    # one before the first rollout, one after every interval-th and one after the last
    count = None if num_rollouts is None else 1 + -(-num_rollouts // interval)
    transport = read(args, "update_weight_transport") or "nccl"
    is_near = bool(read(args, "colocate")) and transport == "nccl"
    whole = num_parameters(shape) * width
    adapters = num_trainable(args, shape) if serves_adapter(args) else 0
    # Engines get adapters by a request and keep them in host memory.
    has_links = transport != "disk" and not is_cpu and not adapters
    received = _received(args, shape, layout, is_near=is_near) if has_links else {}
    return WeightSync(
        mode=read(args, "update_weight_mode") or "full",
        transport=_transport(transport, is_near=is_near, is_cpu=is_cpu),
        bytes=adapters * width or whole,
        buckets=sum(count_buckets((numel * width for numel in stage), limit) for stage in sizes),
        buffer_bytes=limit,
        interval=interval,
        num_syncs=count,
        received=received,
        seconds=sum(size / LINKS[link] for link, size in received.items()),
        base_bytes=whole if adapters else 0,
    )


def _transport(transport: str, *, is_near: bool, is_cpu: bool) -> str:
    """The name of the mechanism. On a CPU the collectives are those of gloo."""
    if is_near:
        return "shared memory" if is_cpu else "CUDA IPC"
    return "gloo" if is_cpu and transport == "nccl" else transport


def _received(args: Namespace, shape: ModelShape, layout: Layout, *, is_near: bool) -> dict[str, int]:
    """Bytes that the busiest device receives, by link. ``slime.backends.megatron_utils.checkpoint.gather`` moves them.

    Engines elsewhere: rank 0 receives the model from the other ranks and broadcasts it to every engine device.
    Engines on the trainer's devices: the rank's own shards cross from stage to stage, then each stage gathers them. A
    device gets the experts that its engine loads there, if the engine divides them.
    """
    width, per_node = precision_of(args).weights, max(1, number(args, "num_gpus_per_node", 8))
    experts = sum(weight.total for weight in model_weights(shape) if weight.split == "expert") * width
    dense = num_parameters(shape) * width - experts
    ways = layout.ep * layout.etp

    def over(size: float, members: int) -> dict[str, float]:
        """``size`` bytes from ``members`` neighboring ranks with equal parts, one of them the receiver's."""
        far = max(0, members - per_node) / members
        return {"network": size * far, "NVLink": size * ((members - 1) / members - far)}

    num_devices = layout.world + (0 if is_near else number(args, "rollout_num_gpus", 0))
    link = "network" if num_devices > per_node else "NVLink"
    parts: list[dict[str, float]]
    if not is_near:
        parts = [{link: dense + experts}]
    elif read(args, "train_backend") == "fsdp":
        parts = [over(dense + experts, layout.world)]
    else:
        is_divided = (
            not read(args, "update_weight_changed_only") and number(args, "rollout_num_gpus", 0) <= layout.world
        )
        blocks = number(args, "sglang_ep_size", 1) if is_divided else 1
        shards = (dense / layout.tp + experts / ways) * (layout.pp - 1) / layout.pp
        parts = [{link: shards}, over(dense, layout.tp), over(experts / blocks, ways)]
    return {link: round(sum(part.get(link, 0.0) for part in parts)) for link in LINKS}


def _stage_tensors(shape: ModelShape, layers: Sequence[int], stage: int, pp: int) -> Iterator[int]:
    """Sizes of the tensors that a stage sends, in order."""
    ends = [weight for weight in model_weights(shape) if weight.where != "layer"]
    if stage == 0:
        yield from (weight.numel for weight in ends if weight.where == "embedding")
    for layer in layers:
        for weight in layer_weights(shape, layer):
            yield from [weight.numel] * weight.count
    if stage == pp - 1:
        for weight in ends:
            if weight.where == "head":
                yield from [weight.numel] * weight.count


def count_buckets(sizes: Iterator[int], limit: int) -> int:
    """Buckets of at most ``limit`` bytes, filled in order. A larger tensor travels alone."""
    count, filled = 0, 0
    for size in sizes:
        if not count or filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count
