"""Builds the live state of a trainer from its flags: model, optimizer, schedule. Called by ``actor`` once.

Must not be imported before ``patches.install`` ran: everything here imports megatron.core.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial

from slime.backends.megatron_utils.arguments import ModelArgs, MuonArgs, PredictionArgs
from slime.backends.megatron_utils.checkpoint.state import TrainState
from slime.backends.megatron_utils.model.build import (
    build_chunks,
    freeze_parameters,
    overlap_communication,
    wrap_data_parallel,
)
from slime.backends.megatron_utils.model.gpt import add_value_head, unwrap
from slime.backends.megatron_utils.model.lora import ADAPTERS, add_adapters
from slime.backends.megatron_utils.model.sparse_attention import fake_quantize_latents
from slime.backends.megatron_utils.model_rules import padded_vocab_size, user_spec
from slime.backends.megatron_utils.optimizer import build_optimizer, build_scheduler
from slime.backends.megatron_utils.precision import fake_quantize_experts, install_deepgemm
from slime.backends.megatron_utils.process_groups import sharding_of
from slime.backends.megatron_utils.transformer_config import build_config
from slime.backends.training.adapter_files import shared_description
from slime.backends.training.arguments import OptimizerArgs, ParallelArgs, PluginArgs, PrecisionArgs
from slime.backends.training.attention import choose_kernel
from slime.batch.arguments import BatchArgs
from slime.config.groups import RunConfig
from slime.hooks import load_optional
from slime.models.lora import LoraConfig
from slime.models.shape import ModelShape


def build_train_state(
    run: RunConfig, shape: ModelShape, *, is_critic: bool = False, lora: LoraConfig | None = None
) -> TrainState:
    """Model, optimizer and schedule, without weights.

    Args:
        lora: train adapters alone. ``shape`` is then that of ``LoraConfig.with_adapters``.
        is_critic: a value head takes the place of the LM head.
    """
    if is_critic:
        shape = dataclasses.replace(shape, is_tied=False)  # the embedding has nothing to share
    precision = run[PrecisionArgs]
    optimizer_args, parallel = run[OptimizerArgs], run[ParallelArgs]
    args, state = run.args, build_model_state(run, shape)
    config = state.config
    if precision.int4_group_size is not None and not is_critic:  # no engine has the critic
        fake_quantize_experts(state.chunks, shape, args.hf_checkpoint, precision.int4_group_size)
    if precision.kv_fp8_block_size is not None and not is_critic:
        fake_quantize_latents(state.chunks, precision.kv_fp8_block_size)
    plugins, prediction = run[PluginArgs], run[PredictionArgs]
    if is_critic:
        add_value_head(state.chunks, init_std=run[ModelArgs].init_method_std, seed=args.seed)
    else:
        install_deepgemm(state.chunks, plugins, args.hf_checkpoint)
    trains_prediction = prediction.enable_mtp_training and bool(prediction.mtp_num_layers) and not is_critic
    if lora is not None:
        add_adapters(state.model, shape, lora)
    # Before gradient buffers and the optimizer are made, so that frozen parameters are in neither.
    freeze_parameters(
        state.model,
        only=plugins.only_train_params_name_list if lora is None else ADAPTERS,
        freeze=plugins.freeze_params_name_list,
        trains_prediction=trains_prediction,
    )
    for chunk in state.chunks if is_critic else ():
        if unwrap(chunk).post_process:  # the patterns mean the LM head, and no checkpoint has a trained value head
            unwrap(chunk).output_layer.requires_grad_(True)
    wrapped = [
        wrap_data_parallel(config, chunk, precision, optimizer_args, parallel, is_later_chunk=index > 0)
        for index, chunk in enumerate(state.chunks)
    ]
    overlap_communication(config, wrapped, parallel)
    optimizer = build_optimizer(wrapped, optimizer_args, precision, run[MuonArgs], is_stateless=args.use_stateless_adam)
    samples = (args.num_rollout or 0) * args.rollout_batch_size * args.n_samples_per_prompt
    scheduler = build_scheduler(
        optimizer,
        optimizer_args,
        num_steps=samples // args.global_batch_size,
        global_batch_size=args.global_batch_size,
    )
    return TrainState(
        wrapped,
        config,
        optimizer,
        scheduler,
        state.sharding,
        trains_prediction=trains_prediction,
        adapter=None if lora is None else shared_description(lora, shape, args.hf_checkpoint),
    )


def build_model_state(run: RunConfig, shape: ModelShape) -> TrainState:
    """The model alone: without weights, optimizer, schedule and gradient buffers."""
    choose_kernel(run[ModelArgs].attention_backend)
    config = build_config(run, shape)
    args = run.args
    provider = load_optional(run[PluginArgs].custom_model_provider_path)
    if provider is not None and "args" in inspect.signature(provider).parameters:
        provider = partial(provider, args=args)
    spec = user_spec(args)
    layers = None if spec is None else (lambda *given: spec(args, *given) if callable(spec) else spec)
    chunks = build_chunks(
        shape, config, padded_vocab_size=padded_vocab_size(args, shape), provider=provider, layers=layers
    )
    return TrainState(chunks, config, None, None, sharding_of(config, run[BatchArgs]))
