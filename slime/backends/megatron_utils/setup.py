"""Starts a trainer process: process groups, seeds, model, optimizer. Called by ``actor`` once.

Must not be imported before ``patches.install.install`` ran: everything here imports megatron.core.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from slime.algorithms.arguments import ModelCopyArgs
from slime.backends.megatron_utils.arguments import ModelArgs, MuonArgs, PredictionArgs
from slime.backends.megatron_utils.model.build import (
    build_chunks,
    freeze_parameters,
    overlap_communication,
    wrap_data_parallel,
)
from slime.backends.megatron_utils.model.gpt import add_value_head
from slime.backends.megatron_utils.model.lora import ADAPTERS, add_adapters
from slime.backends.megatron_utils.model.sparse_attention import fake_quantize_latents
from slime.backends.megatron_utils.model_rules import padded_vocab_size, user_spec
from slime.backends.megatron_utils.optimizer.build import build_optimizer, build_scheduler
from slime.backends.megatron_utils.precision.deepgemm import install_deepgemm
from slime.backends.megatron_utils.precision.quantization import fake_quantize_experts, token_multiple
from slime.backends.megatron_utils.step import TrainState
from slime.backends.megatron_utils.transformer_config import build_config
from slime.backends.training.adapter_files import shared_description
from slime.backends.training.arguments import OptimizerArgs, ParallelArgs, PluginArgs, PrecisionArgs, TrainerArgs
from slime.backends.training.attention import choose_kernel
from slime.backends.training.context_parallel import Sharding
from slime.backends.training.data import row_multiple
from slime.batch.arguments import BatchArgs
from slime.config.groups import from_args
from slime.hooks.load import load_function
from slime.models.lora import LoraConfig
from slime.models.shape import ModelShape
from slime.utils import accelerator
from slime.utils.distributed_utils import destroy_default_group, init_default_group


def init_distributed(parallel: ParallelArgs, trainer: TrainerArgs, *, num_optimizer_instances: int = 1) -> None:
    """Make the default group, Megatron's groups, and the seeds. Waits at most --distributed-timeout-minutes.

    Args:
        num_optimizer_instances: groups of data-parallel ranks that hold all optimizer states each.
    """
    backend = parallel.distributed_backend or accelerator.current().communication_backend
    init_default_group(backend, timeout_s=parallel.distributed_timeout_minutes * 60)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=num_optimizer_instances,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            # With the flag, the pipeline stages of a replica are closer than its data-parallel peers.
            order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            distributed_timeout_minutes=max(1, round(parallel.distributed_timeout_minutes)),
            create_gloo_process_groups=False,
        )
    # the first stage's parameters that no checkpoint holds must not repeat in the next
    seed = trainer.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if trainer.deterministic_mode:
        torch.use_deterministic_algorithms(True)


def destroy_distributed() -> None:
    """Undo :func:`init_distributed`, threads included, as far as no caller holds a group. A collective."""
    mpu.destroy_model_parallel()
    mpu._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # destroy_model_parallel() of 0.16 keeps it
    destroy_default_group()


def build_train_state(
    args: Namespace, shape: ModelShape, *, is_critic: bool = False, lora: LoraConfig | None = None
) -> TrainState:
    """Model, optimizer and schedule, without weights.

    Args:
        lora: train adapters alone. ``shape`` is then that of ``LoraConfig.with_adapters``.
        is_critic: a value head takes the place of the LM head.
    """
    if is_critic:
        shape = dataclasses.replace(shape, is_tied=False)  # the embedding has nothing to share
    precision = from_args(PrecisionArgs, args)
    optimizer_args, parallel = from_args(OptimizerArgs, args), from_args(ParallelArgs, args)
    state = build_model_state(args, shape)
    config = state.config
    if precision.int4_group_size is not None and not is_critic:  # no engine has the critic
        fake_quantize_experts(state.chunks, shape, args.hf_checkpoint, precision.int4_group_size)
    if precision.kv_fp8_block_size is not None and not is_critic:
        fake_quantize_latents(state.chunks, precision.kv_fp8_block_size)
    plugins, prediction = from_args(PluginArgs, args), from_args(PredictionArgs, args)
    if is_critic:
        add_value_head(state.chunks, init_std=from_args(ModelArgs, args).init_method_std, seed=args.seed)
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
    wrapped = [
        wrap_data_parallel(config, chunk, precision, optimizer_args, parallel, is_later_chunk=index > 0)
        for index, chunk in enumerate(state.chunks)
    ]
    overlap_communication(config, wrapped, parallel)
    optimizer = build_optimizer(
        wrapped,
        optimizer_args,
        precision,
        from_args(MuonArgs, args),
        is_stateless=from_args(ModelCopyArgs, args).use_stateless_adam,
    )
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
        _sharding(config, from_args(BatchArgs, args)),
        trains_prediction=trains_prediction,
        adapter=None if lora is None else shared_description(lora, shape, args.hf_checkpoint),
    )


def build_model_state(args: Namespace, shape: ModelShape) -> TrainState:
    """The model alone: without weights, optimizer, schedule and gradient buffers."""
    choose_kernel(from_args(ModelArgs, args).attention_backend)
    config = build_config(args, shape)
    path = from_args(PluginArgs, args).custom_model_provider_path
    provider = None if path is None else _with_args(load_function(path), args)
    spec = user_spec(args)
    layers = None if spec is None else (lambda *given: spec(args, *given) if callable(spec) else spec)
    chunks = build_chunks(
        shape, config, padded_vocab_size=padded_vocab_size(args, shape), provider=provider, layers=layers
    )
    return TrainState(chunks, config, None, None, _sharding(config, from_args(BatchArgs, args)))


def _with_args(provider: Callable[..., Any], args: Namespace) -> Callable[..., Any]:
    return partial(provider, args=args) if "args" in inspect.signature(provider).parameters else provider


def _sharding(config: Any, settings: BatchArgs) -> Sharding:
    tensor_ranks = mpu.get_tensor_model_parallel_world_size()
    slices = tensor_ranks if config.sequence_parallel else 1
    size = mpu.get_context_parallel_world_size()
    return Sharding(
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=size,
        cp_group=mpu.get_context_parallel_group() if size > 1 else None,
        sequence_multiple=math.lcm(token_multiple(config) * slices, row_multiple(settings) * tensor_ranks),
    )
