"""Rules about modes, devices, weight sync, asynchronous training, batch sizes, run length and parallel sizes."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator

from slime.config import groups


def _modes(args: Namespace) -> Iterator[str]:
    if args.debug_rollout_only and args.debug_train_only:
        cause = "--load-debug-rollout-data" if "debug_train_only" not in args.given else "--debug-train-only"
        yield f"--debug-rollout-only and {cause} exclude each other: drop one."
    if sum((args.bf16, args.fp16, args.fp32)) > 1:
        yield "--bf16, --fp16 and --fp32 exclude each other: keep one (bf16 is the default)."


def _devices(args: Namespace) -> Iterator[str]:
    total, per_engine, per_node = args.rollout_num_gpus, args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    # ``numbers`` reports sizes below 1.
    if args.rollout_external or min(per_engine, per_node) < 1:
        return
    if total < 0:
        yield f"--rollout-num-gpus {total} must not be negative."
    elif total % per_engine and args.sglang_config is None:  # the groups of a file have their own widths
        yield (
            f"--rollout-num-gpus {total} must be a multiple of --rollout-num-gpus-per-engine {per_engine}: the rest "
            f"would idle."
        )
    if per_engine > per_node and per_engine % per_node:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is more than --num-gpus-per-node {per_node}: it must then be "
            f"a multiple of it."
        )
    elif per_engine > per_node and total and args.sglang_config is None:
        # Colocated engines begin at the first device of the trainer.
        first = 0 if args.colocate or args.debug_rollout_only else args.world_size
        if first % per_node:
            yield (
                f"--rollout-num-gpus-per-engine {per_engine}: behind the {first} devices of the trainer an engine over "
                f"several nodes would begin in the middle of one (--num-gpus-per-node {per_node}): give the trainer "
                f"whole nodes."
            )


def _drivers(args: Namespace) -> Iterator[str]:
    if args.async_buffer_size < 0:
        yield f"--async-buffer-size {args.async_buffer_size} must be 0 or more."
    if args.is_async and args.colocate:
        yield "--colocate does not work with train_async.py, where engines and trainer work at once: use train.py."
    elif args.is_async and args.offload_rollout:
        yield "--offload-rollout does not work with train_async.py, whose engines work all the time: drop it."
    elif args.offload_rollout and not args.colocate:
        groups.warn(args, "--offload-rollout", "no effect: without --colocate engines have devices of their own")
    if args.offload_communicators and not args.offload_train:
        groups.warn(args, "--offload-communicators", "no effect: the trainer stays on its devices (--offload-train)")
    if args.is_async and args.true_on_policy_mode:
        yield "--true-on-policy-mode does not work with train_async.py, which generates ahead: use train.py."
    if not args.is_async and "async_buffer_size" in args.given:
        groups.warn(args, f"--async-buffer-size {args.async_buffer_size}", "no effect: only train_async.py reads it")
    if args.is_async and 1 < args.update_weights_interval < args.async_buffer_size:
        text = f"weights lag behind by up to --async-buffer-size {args.async_buffer_size} rollouts anyway"
        groups.info(args, f"--update-weights-interval {args.update_weights_interval}", text)


def _weight_sync(args: Namespace) -> Iterator[str]:
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        yield "--update-weight-transport disk needs --update-weight-disk-dir DIR, a directory that every node sees."
    if args.release_train:
        if args.train_backend != "megatron":
            yield f"--release-train works with --train-backend megatron only, not {args.train_backend}."
        if args.use_critic:
            yield (
                f"--release-train does not work with a critic (--advantage-estimator {args.advantage_estimator}): "
                "drop one."
            )
        if args.keep_old_actor:
            yield "--release-train keeps nothing between rollouts: drop --keep-old-actor."
        if args.save is None:
            yield "--release-train starts every step from a checkpoint: it needs --save DIR."
        if (args.update_weight_mode, args.update_weight_transport) != ("full", "disk"):
            yield "--release-train needs --update-weight-mode full and --update-weight-transport disk."
    if args.update_weight_mode == "delta":
        if args.update_weight_transport != "disk":
            yield "--update-weight-mode delta needs --update-weight-transport disk."
        if args.colocate:
            yield "--update-weight-mode delta does not work with --colocate: drop one."
        if args.update_weight_local_checkpoint_dir is None:
            yield "--update-weight-mode delta needs --update-weight-local-checkpoint-dir DIR on the engine hosts."


RULES = (_modes, _devices, _drivers, _weight_sync)


# Batch sizes, the length of the run, parallel sizes


def _steps(args: Namespace) -> Iterator[str]:
    """A rollout's samples fill its optimizer steps. Other samples are dropped with a warning."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    size, steps = args.global_batch_size, args.num_steps_per_rollout
    product = f"--rollout-batch-size {args.rollout_batch_size} x "
    product += f"--n-samples-per-prompt {args.n_samples_per_prompt} = {samples}"
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} must be at least "
            f"--rollout-batch-size {args.rollout_batch_size}."
        )
    # ``numbers`` reports values below 1.
    if steps is None or steps < 1 or samples < 1:
        return
    if steps > samples:
        yield f"--num-steps-per-rollout {steps} is more than the samples of a rollout: {product}."
    elif size > samples:
        yield f"{product} samples per rollout do not fill one step of --global-batch-size {size}."
    elif size != samples // steps and "num_steps_per_rollout" in args.given:
        yield (
            f"{product} must equal --global-batch-size {size} x --num-steps-per-rollout {steps} = {size * steps}: "
            f"drop one of the two, or use --global-batch-size {samples // steps}."
        )
    elif size >= 1 and (rest := samples - size * steps):
        text = f"{product}: the last {rest} samples of every rollout do not fill a step and are dropped"
        groups.warn(args, f"--global-batch-size {size}", text)


def _micro_batches(args: Namespace) -> Iterator[str]:
    if args.use_dynamic_batch_size and (args.max_tokens_per_gpu or 0) < 1:
        yield f"--use-dynamic-batch-size needs --max-tokens-per-gpu N with N above 0, got {args.max_tokens_per_gpu}."
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops forms dynamic micro-batches: it needs --use-dynamic-batch-size."
    # At least 1: ``_parallel_sizes`` reports a world that is too small.
    size, dp_size = args.global_batch_size, max(1, args.world_size // _ranks_per_sample(args))
    if args.debug_rollout_only or size < 1 or args.micro_batch_size < 1:
        return
    if size < dp_size:
        yield (
            f"--global-batch-size {size} is less than the {dp_size} data-parallel ranks of the trainer: every step "
            f"needs a sample for each. Use fewer ranks, or a larger batch."
        )
    elif not args.use_dynamic_batch_size and size % (args.micro_batch_size * dp_size):
        yield (
            f"--global-batch-size {size} must be a multiple of --micro-batch-size {args.micro_batch_size} x {dp_size} "
            f"data-parallel ranks, or use --use-dynamic-batch-size."
        )


def _forward_passes(args: Namespace) -> Iterator[str]:
    limit = args.log_probs_max_tokens_per_gpu
    if limit is None or limit == args.max_tokens_per_gpu:
        return
    if not args.use_dynamic_batch_size:
        text = "no effect without --use-dynamic-batch-size: all passes have --micro-batch-size samples"
        groups.warn(args, "--log-probs-max-tokens-per-gpu", text)
    elif args.use_routing_replay or args.use_rollout_routing_replay:
        yield (
            f"--log-probs-max-tokens-per-gpu {limit} gives passes micro-batches of their own, but --use-routing-replay "
            f"replays micro-batch by micro-batch: use {args.max_tokens_per_gpu} or leave it out."
        )


def _run_length(args: Namespace) -> Iterator[str]:
    if args.num_rollout is not None or args.rollout_global_dataset:
        return
    if args.num_epoch is not None:
        yield (
            f"--num-epoch {args.num_epoch} counts passes over --prompt-data, which --disable-rollout-global-dataset "
            f"does not load: use --num-rollout N."
        )
    else:
        yield "--num-rollout N is required with --disable-rollout-global-dataset: nothing else says how long to train."


def _streaming(args: Namespace) -> Iterator[str]:
    if args.streaming_data and args.num_rollout is None:
        yield "--streaming-data does not know the length of an epoch: it needs --num-rollout N."


def _ranks_per_sample(args: Namespace) -> int:
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    return int(math.prod(max(1, size) for size in sizes))


def _parallel_sizes(args: Namespace) -> Iterator[str]:
    shared = _ranks_per_sample(args)
    if args.world_size % shared and not args.debug_rollout_only:
        yield (
            f"--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node} = "
            f"{args.world_size} trainer ranks must be a multiple of --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} x --pipeline-model-parallel-size {args.pipeline_model_parallel_size} "
            f"x --context-parallel-size {args.context_parallel_size} = {shared}."
        )


BATCH_RULES = (_steps, _micro_batches, _forward_passes, _run_length, _streaming, _parallel_sizes)
