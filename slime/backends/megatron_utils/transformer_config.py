"""megatron-core's config from the arguments and the model's shape: the only place with Megatron's names of fields.

``transformer_config_kwargs`` returns plain values and imports neither torch nor megatron. ``build_config`` makes the
object from them.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slime.backends.megatron_utils.arguments import ExpertArgs, ModelArgs
from slime.backends.megatron_utils.optimizer_rules import has_te_attention, uses_transformer_engine
from slime.backends.training.arguments import ParallelArgs, PluginArgs, PrecisionArgs
from slime.config.groups import RunConfig
from slime.models.hf_shape import read_shape
from slime.models.shape import DeltaNetShape, MlaShape, ModelShape, MoeShape, YarnRope

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


logger = logging.getLogger(__name__)


# Flags that have the names of Megatron's fields.
_SAME = (
    *("attention_dropout", "hidden_dropout", "init_method_std", "deterministic_mode", "calculate_per_token_loss"),
    *("mtp_num_layers", "mtp_loss_scaling_factor"),  # if the layers are not built, --save-hf copies their tensors
    *("fp8", "fp8_recipe", "fp8_quantizer_factory"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
    *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    # Not Megatron's default, with which it refuses variable lengths even for models without experts.
    *("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"),
)
# Those whose absence is not a value of Megatron's field.
_SAME_IF_GIVEN = ("recompute_modules", "microbatch_group_size_per_vp_stage")


def transformer_config_kwargs(run: RunConfig, shape: ModelShape | None = None) -> dict[str, Any]:
    """Arguments of ``TransformerConfig``, or of ``MLATransformerConfig`` if ``multi_latent_attention`` is true.

    The activation function and the dtypes are missing: they are torch objects.

    Args:
        run: its model flags agree with ``shape``, which a rule has checked.
        shape: by default that of ``--hf-checkpoint``.

    Raises:
        ConfigError: ``shape`` is not given, and the model in --hf-checkpoint cannot be trained.
    """
    shape = shape or read_shape(run.values["hf_checkpoint"])
    kwargs = {name: run.values[name] for name in _SAME}
    kwargs |= {name: value for name in _SAME_IF_GIVEN if (value := run.values[name]) not in (None, [])}
    kwargs |= _layers(shape) | _numerics(run) | _parallel(run[ParallelArgs])
    if shape.mla is not None:
        kwargs |= _latent_attention(shape, shape.mla)
    if shape.delta_net is not None:
        kwargs |= _delta_nets(shape.delta_net)
    if shape.moe is not None:
        kwargs |= _experts(run[ExpertArgs], shape.moe)
    return kwargs


def build_config(run: RunConfig, shape: ModelShape | None = None) -> TransformerConfig:
    """Megatron's config of this model. Imports megatron, so ``patches.install`` must have run on a CPU.

    Raises:
        ConfigError: as :func:`transformer_config_kwargs`.
        ValueError: megatron refuses a combination that ``argument_rules`` does not.
    """
    import torch.nn.functional as F
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from slime.algorithms.logprobs import can_compile
    from slime.backends.training.optimizer import dtype_of
    from slime.utils import accelerator

    kwargs = transformer_config_kwargs(run, shape)
    is_cpu = accelerator.current().is_cpu
    fuses = not is_cpu and can_compile()  # the reference numbers of a CPU are those of single operators
    model, dtype = run[ModelArgs], dtype_of(run[PrecisionArgs])
    config_class = MLATransformerConfig if kwargs["multi_latent_attention"] else TransformerConfig
    has_te = has_te_attention(run.args, is_latent=kwargs["multi_latent_attention"])
    config = config_class(
        **kwargs,
        activation_func=F.silu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        use_cpu_initialization=is_cpu,
        bias_activation_fusion=model.bias_swiglu_fusion and (fuses or is_cpu),  # a CPU has patches.swiglu
        bias_dropout_fusion=model.bias_dropout_fusion and fuses,
        attention_backend=AttnBackend[model.attention_backend] if has_te else AttnBackend.auto,
    )
    # Megatron has no such fields, but its layers get nothing except the config.
    config.delta_rule_backend = run[PluginArgs].qwen_gdn_backend
    config.has_te_attention = has_te
    return config


def _layers(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "layernorm_zero_centered_gamma": shape.family.has_zero_centered_norms,
        # With this switch, Megatron sums the gradients of the norms over the tensor-parallel ranks, which is wrong for
        # a joint norm: each rank has another part of its weight.
        "qk_layernorm": shape.has_qk_norm and not shape.family.has_joint_qk_norm,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.has_qkv_bias,
        "attention_output_gate": shape.family.has_output_gate,
        "rotary_interleaved": shape.is_rotary_interleaved,
        "multi_latent_attention": shape.mla is not None,
        "perform_initialization": False,  # every weight comes from a checkpoint
    }


def _numerics(run: RunConfig) -> dict[str, Any]:
    precision = run[PrecisionArgs]
    return {
        "bf16": not (precision.fp16 or precision.fp32),
        "fp16": precision.fp16 and not precision.fp32,
        "attention_softmax_in_fp32": True,
        "variable_seq_lengths": True,
        "transformer_impl": "transformer_engine" if uses_transformer_engine(run.args) else "local",
        "fp8_param": precision.fp8_param_gather,
        # Fused kernels of Apex or TransformerEngine, which are optional. build_config adds those of torch.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }


def _parallel(sizes: ParallelArgs) -> dict[str, Any]:
    virtual = sizes.virtual_pipeline_model_parallel_size
    return {
        "sequence_parallel": sizes.sequence_parallel and sizes.tensor_model_parallel_size > 1,
        "expert_tensor_parallel_size": sizes.tensor_ranks_of_experts,
        "num_layers_in_first_pipeline_stage": sizes.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": sizes.decoder_last_pipeline_num_layers,
        # With interleaving, the previous and the next stage may be one rank: batched exchanges would mix up tensors.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "deallocate_pipeline_outputs": True,
    }


def _latent_attention(shape: ModelShape, mla: MlaShape) -> dict[str, Any]:
    return {
        **asdict(mla),
        "rotary_base": shape.rotary_base,
        "rotary_percent": 1.0,
        **_latent_rope(shape.yarn_rope),
    }


def _delta_nets(delta: DeltaNetShape) -> dict[str, Any]:
    return {
        "linear_attention_freq": [int(is_delta) for is_delta in delta.layers],
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_conv_kernel_dim": delta.conv_kernel_dim,
    }


def _latent_rope(yarn: YarnRope | None) -> dict[str, Any]:
    if yarn is None:
        # Megatron multiplies the softmax scale by YaRN's factor even for plain rope.
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def _experts(settings: ExpertArgs, moe: MoeShape) -> dict[str, Any]:
    coefficients = settings.moe_aux_loss_coeff or [0.0]
    balances = any(coefficients)
    kinds = settings.moe_router_load_balancing_type or ["aux_loss"]
    is_list = len(kinds) > 1
    is_flex = settings.moe_token_dispatcher_type == "flex"
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(has_experts) for has_experts in moe.layers],
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_size,
        "moe_shared_expert_gate": moe.has_shared_gate,
        "moe_router_topk": moe.topk,
        "moe_router_score_function": moe.score_function,
        "moe_router_pre_softmax": moe.pre_softmax,
        "moe_router_enable_expert_bias": moe.has_expert_bias,
        "moe_router_bias_update_rate": settings.moe_router_bias_update_rate or 0.0,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.group_topk,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        # The sigmoid routers of the reference models compute in fp32. DeepEP takes fp32 weights only.
        "moe_router_dtype": settings.moe_router_dtype or ("fp32" if moe.has_expert_bias or is_flex else None),
        # With a coefficient of zero, Megatron would still compute the loss.
        "moe_router_load_balancing_type": (kinds if is_list else kinds[0]) if balances else "none",
        "moe_aux_loss_coeff": (coefficients if is_list else coefficients[0]) if balances else 0.0,
        # Permits "moe_act" in --recompute-modules; layer_specs replaces Megatron's experts.
        "moe_grouped_gemm": True,
        "moe_permute_fusion": is_flex,  # a kernel of Transformer Engine
        "moe_router_fusion": False,
    }
