"""Builds the model: flags and shape -> TransformerConfig -> layer spec -> GPTModel -> data-parallel wrapper.

``setup`` calls it after Megatron's process groups exist. ``checkpoint`` loads the weights.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import correct_amax_history_if_needed
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.checkpoint.tensors import chunks_of
from slime.backends.megatron_utils.layer_specs import (
    block_spec,
    mtp_spec,
    prepare_te_layers,
    user_block,
    with_te_layers,
)
from slime.backends.megatron_utils.model.experts import sort_tokens
from slime.backends.megatron_utils.model.gpt import PackedGPTModel
from slime.backends.megatron_utils.precision import check_recipe
from slime.backends.megatron_utils.vision_model import VisionGPTModel
from slime.backends.training.arguments import OptimizerArgs, ParallelArgs, PrecisionArgs
from slime.models.family import local_name
from slime.models.shape import Llama3Rope, ModelShape
from slime.utils import accelerator
from slime.utils.errors import ConfigError

Provider = Callable[..., Any]
"""``--custom-model-provider-path``: called with those of pre_process, post_process, vp_stage, config that it takes."""

Layers = Callable[[TransformerConfig, int | None], Any]
"""A user's ``--spec``: (config, vp_stage) -> Megatron's layer spec, or a ``Provider``."""


def build_chunks(
    shape: ModelShape,
    config: TransformerConfig,
    *,
    padded_vocab_size: int,
    provider: Provider | None = None,
    layers: Layers | None = None,
) -> list[torch.nn.Module]:
    """This rank's part of the model: one chunk, or with interleaved pipelining one per virtual stage, in order."""
    num_chunks = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if num_chunks is None else list(range(num_chunks))
    return [
        build_model(
            shape, config, padded_vocab_size=padded_vocab_size, vp_stage=stage, provider=provider, layers=layers
        )
        for stage in stages
    ]


def build_model(
    shape: ModelShape,
    config: TransformerConfig,
    *,
    padded_vocab_size: int,
    vp_stage: int | None = None,
    provider: Provider | None = None,
    layers: Layers | None = None,
) -> torch.nn.Module:
    """GPTModel with our attention and norms, on the device, without initial weights.

    The first pipeline stage holds the embedding, the last the LM head. A tied head on another stage is a copy of the
    embedding: Megatron sums their gradients.

    Raises:
        ConfigError: the user's ``provider`` or ``layers`` return something else.
    """
    flag, block = "--custom-model-provider-path", None
    if provider is None and layers is not None:
        described = layers(config, vp_stage)
        # --spec may name a function that builds the model.
        if callable(described) and "pre_process" in inspect.signature(described).parameters:
            provider, flag = described, "--spec"
        else:
            block = user_block(described, config, vp_stage)
    if provider is None:
        model: torch.nn.Module = _family_model(shape, config, padded_vocab_size, vp_stage, block)
    else:
        model = _provided_model(provider, config, vp_stage, flag)
    _mark_shards(model)
    sort_tokens(model)
    if config.transformer_impl == "transformer_engine":
        prepare_te_layers(model)
    model.to(accelerator.current().device())
    if config.params_dtype == torch.float32:
        return model
    wrapped = Float16Module(config, model)
    correct_amax_history_if_needed([model])  # the cast above was recorded as a use of FP8 weights
    for module in model.modules():
        if isinstance(module, TopKRouter):
            # Now, not in the first forward: loading weights comes before it and would round the bias.
            module._maintain_float32_expert_bias()
    return wrapped


def _ends(vp_stage: int | None) -> tuple[bool, bool]:
    """(has the embedding, has the head) of this chunk."""
    is_first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return is_first, mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def _provided_model(provider: Provider, config: TransformerConfig, vp_stage: int | None, flag: str) -> PackedGPTModel:
    is_first, is_last = _ends(vp_stage)
    offered = {"pre_process": is_first, "post_process": is_last, "vp_stage": vp_stage, "config": config}
    parameters = inspect.signature(provider).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    model = provider(**{name: value for name, value in offered.items() if takes_all or name in parameters})
    if not isinstance(model, PackedGPTModel):
        raise ConfigError(
            f"{flag}: the function returned a {type(model).__name__}; it must return a "
            f"{PackedGPTModel.__module__}.{PackedGPTModel.__name__} or a subclass, which reads packed sequences."
        )
    return model


def _family_model(
    shape: ModelShape, config: TransformerConfig, padded_vocab_size: int, vp_stage: int | None, block: Any | None
) -> PackedGPTModel:
    """``block``: decoder layers of the user."""
    is_first, is_last = _ends(vp_stage)
    predicting = mtp_spec(config, shape.family, vp_stage, block=block)
    if block is None:
        block = block_spec(config, shape.family, vp_stage, sparse=shape.sparse)
    if config.fp8:
        check_recipe(config)
    if config.transformer_impl == "transformer_engine":
        block, predicting = with_te_layers(block, config), with_te_layers(predicting, config)
    settings: dict[str, Any] = {}
    model_class = PackedGPTModel
    if shape.vision is not None:
        model_class = VisionGPTModel
        settings = {"vision": shape.vision, "tower_type": shape.family.vision_tower}
    model = model_class(
        config,
        block,
        **settings,
        vocab_size=padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        parallel_output=True,  # a rank keeps the logits of its part of the vocabulary
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        mtp_block_spec=predicting,
        vp_stage=vp_stage,
    )
    if shape.llama3_rope is not None:
        # Megatron's own --use-rope-scaling fixes three of the four factors
        model.rotary_pos_emb.inv_freq = _llama3_frequencies(model.rotary_pos_emb.inv_freq, shape.llama3_rope)
    return model


def wrap_data_parallel(
    config: TransformerConfig,
    model: torch.nn.Module,
    precision: PrecisionArgs,
    optimizer: OptimizerArgs,
    parallel: ParallelArgs,
    *,
    is_later_chunk: bool = False,
) -> DistributedDataParallel:
    """Gradient buffers, reduced over the data-parallel ranks once per step."""
    # Sums of many 16-bit gradients lose the small ones.
    is_wide = precision.accumulate_allreduce_grads_in_fp32 or config.bf16
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=is_wide,
            use_distributed_optimizer=optimizer.is_distributed,
            fp8_param_gather=precision.fp8_param_gather,
            num_distributed_optimizer_instances=optimizer.num_distributed_optimizer_instances,
            check_for_nan_in_grad=False,  # ``step`` looks at all ranks before anything is applied
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            align_param_gather=parallel.align_param_gather,
            bucket_size=parallel.ddp_bucket_size,
        ),
        model,
        disable_bucketing=is_later_chunk,  # as in Megatron-LM
    )
    wrapped.local_sums = []
    for group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        group.start_grad_sync = partial(_sum_and_reduce, wrapped.local_sums, group, group.start_grad_sync)
    return wrapped


def _sum_and_reduce(sums: list[torch.Tensor], group: Any, reduce: Callable[..., None], *args: Any, **kw: Any) -> None:
    """Keep the sums of the gradients before ``reduce``: later they no longer show which rank's are not finite."""
    if group.grad_reduce_handle is None:  # else Megatron does nothing
        sums += [bucket.grad_data.sum(dtype=torch.float32) for bucket in group.buckets]
    reduce(*args, **kw)


def overlap_communication(config: TransformerConfig, wrapped: Sequence[Any], parallel: ParallelArgs) -> None:
    """Give Megatron's schedules the functions of the chunks that start communication, as Megatron-LM does."""

    def of_chunks(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]

    if parallel.overlap_grad_reduce:
        config.no_sync_func = of_chunks([chunk.no_sync for chunk in wrapped])
        if parallel.align_grad_reduce:
            config.grad_sync_func = of_chunks([chunk.start_grad_sync for chunk in wrapped])
    if parallel.overlap_param_gather and parallel.align_param_gather:
        config.param_sync_func = of_chunks([chunk.start_param_sync for chunk in wrapped])


def _mark_shards(model: torch.nn.Module) -> None:
    """Mark the weights that are divided among the tensor-parallel ranks, for the optimizer."""
    for module in model.modules():
        match module:
            case ColumnParallelLinear() | VocabParallelEmbedding():
                dim = 0
            case RowParallelLinear():
                dim = 1
            case _:
                continue
        weight = module.weight
        # Megatron marks weights while it fills in initial ones, which is switched off. Without the mark the gradient
        # norm counts the first rank's shards only, and clipping is wrong on all ranks.
        if weight is not None and "tensor_model_parallel" not in vars(weight):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)


def _llama3_frequencies(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Llama 3.1: long wavelengths are slowed down by ``factor``, short ones kept, those between blended.

    Follows ``apply_scaling`` of Meta's llama-models. ``frequencies``: fp32 ``[head_dim / 2]``.
    """
    wavelength = 2 * math.pi / frequencies
    longest = rope.original_max_position_embeddings / rope.low_freq_factor
    shortest = rope.original_max_position_embeddings / rope.high_freq_factor
    share = rope.original_max_position_embeddings / wavelength - rope.low_freq_factor
    share = share / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    scaled = torch.where(wavelength > longest, frequencies / rope.factor, frequencies)
    is_between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(is_between, blended, scaled)


_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")


def freeze_parameters(
    model: Any, *, only: Sequence[str] | None, freeze: Sequence[str] | None, trains_prediction: bool
) -> None:
    """Switch gradients off. A collective.

    Args:
        only: regular expressions. Parameters whose names match none of them are frozen.
        freeze: regular expressions, if ``only`` is not given. Parameters whose names match one of them are frozen.
        trains_prediction: multi-token-prediction layers learn as well.

    Raises:
        ConfigError: a pattern is invalid or matches no parameter on any rank, or nothing is left to train. Names are
            those of a model on one rank, such as ``decoder.layers.3.mlp.router.weight``.
    """
    flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    patterns = [_compiled(flag, pattern) for pattern in only or freeze or ()]
    parameters = list(global_names(model))
    if patterns:
        _check_found(flag, patterns, [name for name, _ in parameters])
    for name, parameter in parameters:
        is_found = any(pattern.search(name) for pattern in patterns)
        # Frozen are names that --freeze-params finds, or that --only-train-params does not find.
        if (patterns and is_found == bool(freeze)) or (name.startswith("mtp.") and not trains_prediction):
            parameter.requires_grad_(False)
    for chunk in chunks_of(model):
        _start_gradients(chunk)
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, sum(parameter.requires_grad for _, parameter in parameters))
    if not any(counts):
        raise ConfigError(f"{flag} {' '.join(only or freeze or ())} leaves no parameter to train.")


def _start_gradients(chunk: Any) -> None:
    """Let gradients of recomputed layers flow if the embedding is frozen.

    A recomputed part has gradients only if one of its inputs has, and its parameters do not count.
    """
    is_frozen = chunk.pre_process and not any(one.requires_grad for one in chunk.embedding.parameters())
    if is_frozen and chunk.config.recompute_granularity is not None:
        chunk.embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_(torch.is_grad_enabled())
        )


def global_names(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank under the names of local layers, with the layer numbers of the whole model."""
    for chunk in chunks_of(model):
        for name, parameter in chunk.named_parameters():
            found = _LAYER.search(name)
            if found:
                # Counted from 1 over the whole model.
                number = chunk.decoder.layers[int(found.group())].layer_number - 1
                name = _LAYER.sub(str(number), name)
            yield local_name(name), parameter


def _compiled(flag: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{flag} {pattern}: not a regular expression: {error}.") from None


def _check_found(flag: str, patterns: Sequence[re.Pattern[str]], names: Sequence[str]) -> None:
    """Raise if a pattern matches nothing on any rank: a typo would silently train everything, or nothing."""
    found: list[list[bool]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, [any(pattern.search(name) for name in names) for pattern in patterns])
    for pattern, *hits in zip(patterns, *found, strict=True):
        if not any(hits):
            example = next((name for name in names if ".layers." in name), names[0])
            raise ConfigError(f"{flag} {pattern.pattern} finds no parameter; names look like {example}.")
