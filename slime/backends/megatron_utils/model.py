"""Arguments -> TransformerConfig -> GPTModel wrapped for data parallelism. Needs model-parallel groups to exist."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.model_shape import ModelShape
from slime.backends.megatron_utils.norms import make_norm
from slime.utils import accelerator
from slime.utils.errors import ConfigError

__all__ = ["build_model", "params_dtype", "transformer_config", "unwrap"]

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def params_dtype(args: Namespace) -> torch.dtype:
    if args.fp32:
        return torch.float32
    return torch.float16 if args.fp16 else torch.bfloat16


def transformer_config(args: Namespace, shape: ModelShape) -> TransformerConfig:
    dtype = params_dtype(args)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.qk_layernorm,
        add_qkv_bias=shape.add_qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=accelerator.current().is_cpu,
        # CUDA kernels that stock megatron-core only has with TransformerEngine or Apex
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even without experts
        calculate_per_token_loss=args.calculate_per_token_loss,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        finalize_model_grads_func=finalize_model_grads,
    )


def build_model(args: Namespace, shape: ModelShape) -> DistributedDataParallel:
    """A GPTModel with random weights, wrapped so that gradients are averaged over the data-parallel ranks."""
    config = transformer_config(args, shape)
    model: torch.nn.Module = GPTModel(
        config,
        _layer_specs(config),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
        **_rope_scaling(shape),
    )
    if not accelerator.current().is_cpu:
        model = model.cuda()
    if config.bf16 or config.fp16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=False
    )
    return DistributedDataParallel(config, ddp_config, model)


def unwrap(model: torch.nn.Module) -> GPTModel:
    while hasattr(model, "module"):
        model = model.module
    return model  # type: ignore[return-value]


def _layer_specs(config: TransformerConfig) -> Any:
    """megatron-core's local layers with our attention and norms in their places."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        places = ((layer.submodules, "input_layernorm pre_mlp_layernorm"), (attention, "q_layernorm k_layernorm"))
        for owner, names in places:
            for name in names.split():
                if getattr(owner, name) not in (None, IdentityOp):
                    setattr(owner, name, make_norm)
    block.layer_norm = make_norm
    return block


def _rope_scaling(shape: ModelShape) -> dict[str, Any]:
    if shape.rope_scaling is None:
        return {}
    for name, value in _LLAMA3_ROPE.items():
        if shape.rope_scaling.get(name, value) != value:
            raise ConfigError(
                f"config.json: rope scaling {name} {shape.rope_scaling[name]} is not supported; megatron-core has {value}."
            )
    return {"rope_scaling": True, "rope_scaling_factor": shape.rope_scaling["factor"]}


