"""Builds the model: flags and shape -> TransformerConfig -> layer spec -> GPTModel -> data-parallel wrapper.

Called by ``setup`` once Megatron's process groups exist. Knows nothing of weights: ``hf_checkpoint`` and ``checkpoint``
fill them in.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.arguments import ModelArgs, OptimizerArgs, ParallelArgs, PrecisionArgs, TrainerArgs
from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.model_shape import Llama3Rope, ModelShape
from slime.backends.megatron_utils.norms import TorchNorm
from slime.utils import accelerator

__all__ = ["build_config", "build_model", "params_dtype", "unwrap", "uses_distributed_optimizer", "wrap_data_parallel"]


def params_dtype(precision: PrecisionArgs) -> torch.dtype:
    """bfloat16 unless --fp16 or --fp32."""
    if precision.fp32:
        return torch.float32
    return torch.float16 if precision.fp16 else torch.bfloat16


def build_config(
    shape: ModelShape,
    model: ModelArgs,
    parallel: ParallelArgs,
    precision: PrecisionArgs,
    trainer: TrainerArgs,
    *,
    per_token_loss: bool,
) -> TransformerConfig:
    """Everything megatron-core needs to know about one layer."""
    dtype = params_dtype(precision)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.family.has_qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.family.has_qkv_bias,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method_std=model.init_method_std,
        use_cpu_initialization=accelerator.current().is_cpu,
        perform_initialization=False,  # every weight comes from a checkpoint
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable lengths are refused with the default, even without experts
        deterministic_mode=trainer.deterministic_mode,
        calculate_per_token_loss=per_token_loss,
        recompute_granularity=precision.recompute_granularity,
        recompute_method=precision.recompute_method,
        recompute_num_layers=precision.recompute_num_layers,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        deallocate_pipeline_outputs=True,
    )


def build_model(shape: ModelShape, config: TransformerConfig, *, padded_vocab_size: int) -> torch.nn.Module:
    """GPTModel with our attention and norms, on the device, without initial weights. Its logits are always fp32."""
    model = GPTModel(
        config,
        _block_spec(config),
        vocab_size=padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
    )
    if shape.llama3_rope is not None:
        # Megatron's own --use-rope-scaling fixes three of the four factors
        model.rotary_pos_emb.inv_freq = _llama3_frequencies(model.rotary_pos_emb.inv_freq, shape.llama3_rope)
    model.to(accelerator.current().device())
    return model if config.params_dtype == torch.float32 else Float16Module(config, model)


def wrap_data_parallel(
    config: TransformerConfig, model: torch.nn.Module, precision: PrecisionArgs, optimizer: OptimizerArgs
) -> DistributedDataParallel:
    """Gradient buffers, reduced over the data-parallel ranks once per step."""
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=precision.accumulate_allreduce_grads_in_fp32 or config.bf16,
            use_distributed_optimizer=uses_distributed_optimizer(optimizer),
            check_for_nan_in_grad=False,  # ``step`` looks at all ranks before anything is applied
        ),
        model,
    )


def uses_distributed_optimizer(optimizer: OptimizerArgs) -> bool:
    if optimizer.use_distributed_optimizer is None:
        return optimizer.optimizer == "adam"
    return optimizer.use_distributed_optimizer


def unwrap(model: Any) -> GPTModel:
    """The GPTModel inside the wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _block_spec(config: TransformerConfig) -> Any:
    """Megatron's local (not TransformerEngine) layers with our core attention and norms."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        for owner, names in (
            (layer.submodules, ("input_layernorm", "pre_mlp_layernorm")),
            (attention, ("q_layernorm", "k_layernorm")),
        ):
            for name in names:
                if getattr(owner, name) not in (None, IdentityOp):
                    setattr(owner, name, TorchNorm)
    block.layer_norm = TorchNorm
    return block


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
