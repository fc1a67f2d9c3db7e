"""Device memory of a trainer rank: weights, gradients, optimizer states, activations, logits. An upper estimate.

Weights and states are exact. Activations follow Korthikanti et al. 2022 (arXiv:2205.05198) section 4, with the terms of
a layer without dropout and without a stored softmax matrix. docs/plan.md derives them. CUDA context, NCCL buffers and
fragmentation are not counted.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime.algorithms.arguments import CUDA_CHUNK_ROWS
from slime.config.plan.placement import Layout, number, read, stage_layers
from slime.models.cost import Weight, gathered_keys, layer_activations, layer_weights, model_weights
from slime.models.lora import LoraConfig
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

# A save writes live tensors: two threads of a rank copy a piece of at most 128 MiB each. Training goes on with
# --async-save, so up to 4 bytes per parameter are copied first.
_BUFFERS_AT_SAVE, _COPIED_AT_SAVE = 2 * 128 * 1024**2, 4
LARGEST_ROUNDED = 64 * 1024**2
"""Pinned blocks of more bytes are not rounded up to powers of two. The run sets torch's limit to this value."""
_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Precision:
    """Bytes per number.

    Attributes:
        states: of the optimizer per parameter: main weights and moments.
    """

    name: str
    weights: int
    gradients: int
    states: int


@dataclass(frozen=True)
class Tokens:
    """Tokens of one micro-batch on one rank. ``source`` names the flag with the number."""

    count: int
    source: str


@dataclass(frozen=True)
class StageMemory:
    """One rank of one pipeline stage, in bytes.

    Attributes:
        parameters: numbers of weights that the rank holds.
        in_flight: micro-batches whose activations are alive at once (1F1B, arXiv:2104.04473).
        gathered_keys: the part of ``activations`` that is due to context parallelism.
        trained: numbers of weights in adapters if only they are trained. 0 if all weights are.
        without_adapters: ``total`` if all weights were trained. 0 if they are.
        gathered_weights, gathered_gradients: the parts of ``weights`` and ``gradients`` that exist during a pass only.
        host_copies: pinned host memory for copies of weights, per rank: see ``_num_host_copies``.
        host_states: host memory for optimizer states, per rank.
        host_offloaded: pinned host memory for optimizer states that move there while engines generate, per rank.
        host_save: buffers in host memory while a checkpoint is written, per rank. It takes no device memory.
    """

    stage: int
    layers: tuple[int, int]
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    in_flight: int
    host_copies: int
    host_states: int = 0
    host_offloaded: int = 0
    host_save: int = 0
    gathered_keys: int = 0
    trained: int = 0
    without_adapters: int = 0
    gathered_weights: int = 0
    gathered_gradients: int = 0

    @property
    def resident(self) -> int:
        """Bytes that stay between passes."""
        held = self.weights + self.gradients + self.optimizer
        return held - self.gathered_weights - self.gathered_gradients

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def precision_of(args: Namespace) -> Precision:
    """Mixed precision keeps fp32 main weights (4) and Adam's moments (4 + 4). fp32 needs no main copy."""
    name = "fp32" if read(args, "fp32") else "fp16" if read(args, "fp16") else "bf16"
    width = _WIDTH[name]
    moments = _width(args, "exp_avg_dtype") + _width(args, "exp_avg_sq_dtype")
    # Overrides the moments of Adam: SGD has at most one, in fp32.
    if read(args, "optimizer") == "sgd":
        moments = 4 if read(args, "sgd_momentum") else 0
    main = 0 if name == "fp32" else _width(args, "main_params_dtype")
    return Precision(name, width, _width(args, "main_grads_dtype"), main + moments)


def _width(args: Namespace, flag: str) -> int:
    return _WIDTH.get(str(read(args, flag)).removeprefix("torch."), 4)


def tokens_per_micro_batch(args: Namespace) -> Tokens:
    """The largest micro-batch: the token budget, or ``micro_batch_size`` samples of the greatest length.

    A sample that is longer than the budget is alone in a micro-batch.
    """
    size, cp = number(args, "micro_batch_size", 1), max(1, number(args, "context_parallel_size", 1))
    budget = read(args, "max_tokens_per_gpu") if read(args, "use_dynamic_batch_size") else None
    context = read(args, "rollout_max_context_len")
    if context is None:
        prompt = read(args, "rollout_max_prompt_len")
        response = number(args, "rollout_max_response_len", 1024)
        length, source = response + (prompt or 0), "--rollout-max-response-len"
        if prompt is not None:
            source = f"--rollout-max-prompt-len + {source}"
    else:
        length, source = int(context), "--rollout-max-context-len"
    shared = f" / CP {cp}" if cp > 1 else ""
    if budget:
        longest = -(-length // cp)
        return Tokens(longest, f"1 x {source}{shared}") if longest > budget else Tokens(budget, "--max-tokens-per-gpu")
    return Tokens(-(-size * length // cp), f"{size} x {source}{shared}")


def stage_memory(args: Namespace, shape: ModelShape, layout: Layout) -> list[StageMemory]:
    """One entry per pipeline stage."""
    stages = _stage_memory(args, shape, layout)
    if not any(stage.trained for stage in stages):
        return stages
    whole = _stage_memory(Namespace(**vars(args) | {"lora_rank": 0}), shape, layout)
    return [replace(one, without_adapters=other.total) for one, other in zip(stages, whole, strict=True)]


def _stage_memory(args: Namespace, shape: ModelShape, layout: Layout) -> list[StageMemory]:
    tokens = tokens_per_micro_batch(args).count
    if read(args, "train_backend") == "fsdp":
        return [_fully_sharded(args, shape, layout, tokens)]
    stages = stage_layers(args, shape.num_layers, layout.pp)
    return [_stage(args, shape, layout, stages, stage, tokens) for stage in range(layout.pp)]


def _stage(
    args: Namespace, shape: ModelShape, layout: Layout, stages: Sequence[range], stage: int, tokens: int
) -> StageMemory:
    layers, precision = stages[stage], precision_of(args)
    is_last = stage == layout.pp - 1
    vocab = padded_vocab_size(args, shape)
    held = list(_held(shape, layers, vocab, is_first=stage == 0, is_last=is_last))
    dense = sum(_share(weight, layout) for weight in held if weight.split != "expert")
    expert = sum(_share(weight, layout) for weight in held if weight.split == "expert")
    # ZeRO stage 1 (arXiv:1910.02054): only optimizer states are sharded, over the ranks that hold the same weights
    given, kind = read(args, "use_distributed_optimizer"), read(args, "optimizer")
    is_sharded = kind == "dist_muon" or (given if given is not None else kind in (None, "adam"))
    groups = max(1, number(args, "num_distributed_optimizer_instances", 1))  # each instance has all states
    shards, expert_shards = max(1, layout.dp * layout.cp // groups), max(1, layout.edp // groups)
    adapters = adapter_numbers(args, shape, layers, tensor_ranks=layout.tp, expert_ranks=layout.ep)
    trained, trained_experts = adapters or (dense, expert)
    states = trained / shards + trained_experts / expert_shards if is_sharded else trained + trained_experts
    offloaded = _offloaded_share(args)
    # An optimizer on the host keeps separate main weights, even if the model is in fp32.
    main_copy = 4 if precision.name == "fp32" and read(args, "optimizer_cpu_offload") else 0
    # 1F1B: earlier stages hold more micro-batches.
    in_flight = _in_flight(args, layout, stage)
    activations = round(_activations(args, shape, layout, layers, tokens, in_flight, precision))
    alone = round(_activations(args, shape, replace(layout, cp=1), layers, tokens, in_flight, precision))
    on_device = round(states * (precision.states + main_copy) * (1 - offloaded))
    on_host = states * (precision.states + main_copy) * offloaded
    # Main weights and moments are fp32 blocks, one per tensor, each on one of the ranks that share the states.
    added = sum(adapters or ())
    rounding = sum(_blocks(weight, layout, 4) for weight in held) / max(1, 4 * (dense + expert))
    return StageMemory(
        stage=stage,
        layers=(layers.start, layers.stop - 1),
        parameters=round(dense + expert + added),
        weights=round((dense + expert + added) * precision.weights),
        gradients=round((trained + trained_experts) * precision.gradients),
        optimizer=on_device,
        activations=activations,
        logits=_logits(args, shape, layout, tokens, precision) if is_last else 0,
        in_flight=in_flight,
        host_copies=_host_copies(args, held, layout, precision, adapters),
        host_states=round(on_host * rounding),
        host_offloaded=on_device if read(args, "offload_train") else 0,
        host_save=(
            round(_COPIED_AT_SAVE * (trained + trained_experts)) if read(args, "async_save") else _BUFFERS_AT_SAVE
        ),
        gathered_keys=activations - alone,
        trained=round(added),
    )


def padded_vocab_size(args: Namespace, shape: ModelShape) -> int:
    """Rows of the embedding in the trainer."""
    step = number(args, "make_vocab_size_divisible_by", 128) * number(args, "tensor_model_parallel_size", 1)
    return int(read(args, "padded_vocab_size") or shape.padded_vocab_size(step))


def adapter_numbers(
    args: Namespace, shape: ModelShape, layers: Sequence[int], *, tensor_ranks: int = 1, expert_ranks: int = 1
) -> tuple[float, float] | None:
    """Numbers in the adapters of a rank: (all but experts, experts). None without adapters that fit the model."""
    lora = LoraConfig.of(vars(args))
    try:
        sizes = {"tensor_ranks": tensor_ranks, "expert_ranks": expert_ranks}
        return None if lora is None else lora.numbers_on_rank(shape, layers, **sizes)
    except ConfigError:  # a rule reports it
        return None


def num_trainable(args: Namespace, shape: ModelShape) -> int:
    """Numbers in the adapters of the whole model. 0 if all weights are trained."""
    return round(sum(adapter_numbers(args, shape, range(shape.num_layers)) or ()))


def _host_copies(
    args: Namespace,
    held: Sequence[Weight],
    layout: Layout,
    precision: Precision,
    adapters: tuple[float, float] | None,
) -> int:
    copies = _num_host_copies(args)
    weights = round(sum(_blocks(weight, layout, precision.weights) for weight in held))
    if adapters is None:
        return copies * weights
    # The base has one copy at most, while engines use the device. The reference is the base without adapters.
    return weights * bool(read(args, "offload_train")) + round(sum(adapters) * precision.weights) * copies


def _fully_sharded(args: Namespace, shape: ModelShape, layout: Layout, tokens: int) -> StageMemory:
    """FSDP, ZeRO stage 3 (arXiv:1910.02054): fp32 weights, gradients and moments are divided among all ranks.

    Not divided during a pass: embedding, head, the current layer and the prefetched one in the computing dtype, and
    their gradients in fp32 until they are reduced. Beside adapters, the frozen weights are stored in that dtype.
    """
    layers, precision = range(shape.num_layers), precision_of(args)
    ends = sum(weight.total for weight in model_weights(shape) if weight.where != "layer")
    sizes = [sum(weight.total for weight in layer_weights(shape, layer)) for layer in layers]
    share = (ends + sum(sizes)) / layout.world
    # The fp32 weights are a part of ``weights`` here.
    moments = precision.states - (0 if precision.name == "fp32" else _width(args, "main_params_dtype"))
    by_layer = [adapter_numbers(args, shape, [layer]) for layer in layers]
    added = [sum(numbers) for numbers in by_layer if numbers is not None]
    own = sum(added) / layout.world
    is_frozen = bool(added)
    trained, whole = (own, max(added)) if is_frozen else (share, ends + max(sizes))
    frozen = share * precision.weights if is_frozen else 0
    gathered = (ends + 2 * max(sizes) + 2 * max(added, default=0)) * precision.weights
    return StageMemory(
        stage=0,
        layers=(layers.start, layers.stop - 1),
        parameters=round(share + own),
        weights=round(frozen + trained * 4 + gathered),
        gradients=round((trained + whole) * 4),
        optimizer=round(trained * moments),
        activations=round(_activations(args, shape, layout, layers, tokens, 1, precision)),
        logits=_logits(args, shape, layout, tokens, precision),
        in_flight=1,
        host_copies=round(trained * 4) * _num_host_copies(args) + round(frozen) * bool(read(args, "offload_train")),
        host_offloaded=round(trained * moments) if read(args, "offload_train") else 0,
        host_save=_BUFFERS_AT_SAVE,
        trained=round(own),
        gathered_weights=round(gathered),
        gathered_gradients=round((trained + whole) * 4),
    )


def _blocks(weight: Weight, layout: Layout, width: int) -> float:
    """Bytes of pinned host memory for this weight on one rank, see :data:`LARGEST_ROUNDED`."""
    # The experts of a layer are two blocks, others are a block per tensor.
    count = 1 if weight.split == "expert" else weight.count
    block = max(1, round(_share(weight, layout) * width / count))
    return count * (block if block > LARGEST_ROUNDED else 1 << (block - 1).bit_length())


def _held(shape: ModelShape, layers: range, vocab: int, *, is_first: bool, is_last: bool) -> list[Weight]:
    """The weights of a stage. If head and embedding are tied but on different stages, the head is a second copy."""
    ends = [weight for weight in model_weights(shape, vocab=vocab) if weight.where != "layer"]
    held = [weight for weight in ends if weight.where == "head" and is_last]
    held += [weight for weight in ends if weight.where == "embedding" and is_first]
    if is_last and not is_first and shape.is_tied:
        held += [weight for weight in ends if weight.name == "embed_tokens"]
    for layer in layers:
        held += layer_weights(shape, layer)
    return held


def _share(weight: Weight, layout: Layout) -> float:
    """Numbers of this weight on one rank."""
    match weight.split:
        case "all":
            return weight.numel * weight.count
        case "tensor":
            return weight.numel * weight.count / layout.tp
        case "expert":
            return weight.numel * weight.count / (layout.ep * layout.etp)


def _offloaded_share(args: Namespace) -> float:
    if not read(args, "optimizer_cpu_offload"):
        return 0.0
    fraction = read(args, "optimizer_offload_fraction")
    return 1.0 if fraction is None else float(fraction)


def _num_host_copies(args: Namespace) -> int:
    """Copies of the weights on the host: reference, teacher, old actor, and the actor's while one of these is on the
    device. One more keeps the actor's while engines use the device."""
    others = sum(
        (
            bool(read(args, "kl_coef")) or bool(read(args, "use_kl_loss")),
            bool(read(args, "use_opd") and read(args, "opd_type") == "megatron"),
            bool(read(args, "keep_old_actor")),
        )
    )
    return int(others + (others > 0)) + bool(read(args, "offload_train"))


def _in_flight(args: Namespace, layout: Layout, stage: int) -> int:
    """1F1B: stage p of P holds the activations of P - p micro-batches (interleaved: up to (P - 1) / V more)."""
    per_rank = number(args, "global_batch_size", 1) // max(1, layout.dp)
    if not read(args, "use_dynamic_batch_size"):
        per_rank //= max(1, number(args, "micro_batch_size", 1))
    extra = -(-(layout.pp - 1) // layout.vpp) if layout.vpp > 1 else 0
    return max(1, min(layout.pp - stage + extra, max(1, per_rank)))


def _activations(
    args: Namespace, shape: ModelShape, layout: Layout, layers: range, tokens: int, in_flight: int, precision: Precision
) -> float:
    """Numbers stored for the backward pass, section 4 and (recomputation) section 5 of arXiv:2205.05198."""
    width = precision.weights
    tp, has_sp = layout.tp, layout.has_sequence_parallel
    stored, during = [], 0.0
    for layer in layers:
        one = layer_activations(shape, layer, width, tp=tp, expert_tp=layout.etp, has_sequence_parallel=has_sp)
        kept, temporary = gathered_keys(shape, layer, cp=layout.cp, tp=tp)
        stored.append(tokens * (one + width * kept))
        during = max(during, tokens * width * temporary)
    if not stored:
        return 0.0
    if read(args, "recompute_granularity") != "full":
        return sum(stored) * in_flight + during
    # The input of a recomputed unit is stored, and its activations exist for one unit at a time.
    checkpoint = tokens * shape.hidden_size * width / (tp if has_sp else 1)
    unit = number(args, "recompute_num_layers", 1)
    if read(args, "recompute_method") == "block":  # the first N layers are recomputed, the others stored
        held = sum(stored[unit:]) + checkpoint * min(unit, len(stored))
        return held * in_flight + max(stored) + during
    return -(-len(stored) // unit) * checkpoint * in_flight + max(stored) * min(unit, len(stored)) + during


def _logits(args: Namespace, shape: ModelShape, layout: Layout, tokens: int, precision: Precision) -> int:
    """Bytes of logits and gradient in the weights' dtype, and of an fp32 chunk, or two if all rows are one chunk."""
    rows = padded_vocab_size(args, shape) / layout.tp
    chunk = number(args, "log_probs_chunk_size", CUDA_CHUNK_ROWS)
    chunk = 2 * tokens if chunk < 1 else min(chunk, 2 * tokens)
    return round(tokens * rows * 2 * precision.weights + chunk * rows * 4)
