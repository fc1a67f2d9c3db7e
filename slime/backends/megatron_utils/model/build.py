"""Builds the model: flags and shape -> TransformerConfig -> layer spec -> GPTModel -> data-parallel wrapper.

Called by ``setup`` once Megatron's process groups exist. Knows nothing of weights: ``hf_checkpoint`` and ``checkpoint``
fill them in.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
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

from slime.backends.megatron_utils.arguments import OptimizerArgs, PrecisionArgs
from slime.backends.megatron_utils.layer_specs import block_spec, mtp_spec, user_block
from slime.backends.megatron_utils.model.gpt import PackedGPTModel
from slime.backends.megatron_utils.precision.fp8_layers import check_recipe, with_fp8_layers
from slime.backends.megatron_utils.vision_model import VisionGPTModel
from slime.models.shape import Llama3Rope, ModelShape
from slime.utils import accelerator
from slime.utils.errors import ConfigError

__all__ = [
    "build_chunks",
    "build_model",
    "params_dtype",
    "uses_distributed_optimizer",
    "wrap_data_parallel",
]


def params_dtype(precision: PrecisionArgs) -> torch.dtype:
    """bfloat16 unless --fp16 or --fp32."""
    if precision.fp32:
        return torch.float32
    return torch.float16 if precision.fp16 else torch.bfloat16


Provider = Callable[..., Any]
"""``--custom-model-provider-path``: called with those of pre_process, post_process, vp_stage, config that it takes."""

Layers = Callable[[TransformerConfig, int | None], Any]
"""A user's ``--spec``: (config, vp_stage) -> Megatron's description of layers, or a ``Provider``."""


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

    The first pipeline stage holds the embedding, the last the LM head; a tied head on another stage than the embedding
    is a copy whose gradients Megatron sums with the embedding's.

    Raises:
        ConfigError: the user's ``provider`` or ``layers`` return something else.
    """
    flag, block = "--custom-model-provider-path", None
    if provider is None and layers is not None:
        described = layers(config, vp_stage)
        if callable(described) and "pre_process" in inspect.signature(described).parameters:
            provider, flag = described, "--spec"
        else:
            block = user_block(described, config, vp_stage)
    if provider is None:
        model: torch.nn.Module = _family_model(shape, config, padded_vocab_size, vp_stage, block)
    else:
        model = _provided_model(provider, config, vp_stage, flag)
    _mark_shards(model)
    model.to(accelerator.current().device())
    if config.params_dtype == torch.float32:
        return model
    wrapped = Float16Module(config, model)
    correct_amax_history_if_needed([model])  # the cast above counted as a use of weights in FP8
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()  # now, not in the first forward: weights are loaded before that
    return wrapped


def _ends(vp_stage: int | None) -> tuple[bool, bool]:
    """Whether this chunk has the embedding, and whether it has the head."""
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
        block, predicting = with_fp8_layers(block), with_fp8_layers(predicting)
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
        parallel_output=True,
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
    *,
    is_later_chunk: bool = False,
) -> DistributedDataParallel:
    """Gradient buffers, reduced over the data-parallel ranks once per step."""
    is_wide = precision.accumulate_allreduce_grads_in_fp32 or config.bf16
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=is_wide,
            use_distributed_optimizer=uses_distributed_optimizer(optimizer),
            fp8_param_gather=precision.fp8_param_gather,
            num_distributed_optimizer_instances=optimizer.num_distributed_optimizer_instances,
            check_for_nan_in_grad=False,  # ``step`` looks at all ranks before anything is applied
        ),
        model,
        disable_bucketing=is_later_chunk,
    )


def uses_distributed_optimizer(optimizer: OptimizerArgs) -> bool:
    if optimizer.use_distributed_optimizer is None:
        return optimizer.optimizer == "adam"
    return optimizer.use_distributed_optimizer


def _mark_shards(model: torch.nn.Module) -> None:
    """Tell the optimizer which weights are divided among the tensor-parallel ranks.

    Megatron does this while it fills in initial weights, which is switched off. Without the mark the gradient norm
    counts the first rank's shards only, and clipping is wrong on all of them.
    """
    for module in model.modules():
        match module:
            case ColumnParallelLinear() | VocabParallelEmbedding():
                dim = 0
            case RowParallelLinear():
                dim = 1
            case _:
                continue
        weight = module.weight
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)


def _llama3_frequencies(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Llama 3.1: long wavelengths are slowed down by ``factor``, short ones kept, those between blended.

    Follows the reference in Meta's llama-models, ``apply_scaling``; ``frequencies`` fp32 ``[head_dim / 2]``.
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
