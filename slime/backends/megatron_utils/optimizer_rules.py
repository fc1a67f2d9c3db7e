"""Rules of the optimizer's flags: which one, where its states are, and the schedules. Called by ``argument_rules``.

A rule returns one sentence per problem. Imports neither torch nor megatron.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.backends.training.arguments import ParallelArgs
from slime.config.groups import from_args


def optimizer(args: Namespace) -> Iterator[str]:
    """Which optimizer, and where its states are."""
    kind, is_sharded = args.optimizer, args.use_distributed_optimizer
    if kind != "adam" and is_sharded:  # Megatron cannot save other sharded states
        yield f"--use-distributed-optimizer works with --optimizer adam only: drop it for {kind}."
    if (kind == "muon" and args.fp16) or (kind == "dist_muon" and not args.bf16):
        precision = "--fp16" if args.fp16 else "--fp32, whose checkpoints Megatron cannot write"
        yield f"--optimizer {kind} does not work with {precision}: use bf16, the default."
    fraction = args.optimizer_offload_fraction
    if not 0 <= fraction <= 1:
        yield f"--optimizer-offload-fraction {fraction} must be between 0 and 1."
    if not args.optimizer_cpu_offload:
        if fraction != 1:
            yield f"--optimizer-offload-fraction {fraction} needs --optimizer-cpu-offload."
        return
    if not args.use_precision_aware_optimizer:
        yield "--optimizer-cpu-offload needs --use-precision-aware-optimizer."
    if kind != "adam" or not is_sharded:
        yield "--optimizer-cpu-offload needs --optimizer adam and --use-distributed-optimizer."
    if args.fp16 and not args.accumulate_allreduce_grads_in_fp32:
        yield (
            "--optimizer-cpu-offload with --fp16 needs --accumulate-allreduce-grads-in-fp32: the update on the CPU is "
            "given fp32 gradients."
        )


def instances(args: Namespace) -> Iterator[str]:
    """Groups of data-parallel ranks that each have all optimizer states."""
    count = args.num_distributed_optimizer_instances
    if count <= 1:
        return
    flag = f"--num-distributed-optimizer-instances {count}"
    if not args.use_distributed_optimizer:
        yield f"{flag} needs --use-distributed-optimizer: without, every rank has all states."
    pipeline, expert = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    copies = args.world_size // max(1, args.tensor_model_parallel_size * pipeline)  # context-parallel ranks count
    tensor = from_args(ParallelArgs, args).tensor_ranks_of_experts
    expert_copies = args.world_size // max(1, tensor * expert * pipeline)
    if copies % count:
        yield f"{flag} must divide the {copies} data- and context-parallel ranks."
    elif expert_copies % count:
        yield f"{flag} must divide the {expert_copies} copies of an expert."


def overlap(args: Namespace) -> Iterator[str]:
    """Communication of gradients and weights during the passes."""
    if args.overlap_grad_reduce and vars(args).get("multimodal_keys"):
        yield (
            "--overlap-grad-reduce does not work with --multimodal-keys: Megatron waits for a gradient of every "
            "weight, and a micro-batch without images has none for the vision tower. Drop --overlap-grad-reduce."
        )
    if not args.overlap_param_gather:
        return
    if not args.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce."
    if not args.use_distributed_optimizer:
        yield "--overlap-param-gather needs --use-distributed-optimizer: without, no weight is gathered."
    if args.fp8_param_gather:
        yield "--overlap-param-gather and --fp8-param-gather exclude each other: FP8 weights are gathered after a step."


def schedule(args: Namespace) -> Iterator[str]:
    fraction, steps = args.lr_warmup_fraction, args.lr_warmup_iters
    if fraction is not None and steps:
        yield f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {steps} exclude each other: keep one."
    if fraction is not None and not 0 <= fraction < 1:
        yield f"--lr-warmup-fraction {fraction} must be at least 0 and below 1."
    if steps < 0:
        yield f"--lr-warmup-iters {steps} must not be negative."
    if args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} must not exceed --lr {args.lr}."
    if not 0 <= args.lr_warmup_init <= args.lr:
        yield f"--lr-warmup-init {args.lr_warmup_init} must be between 0 and --lr {args.lr}."
    is_wsd, decay = args.lr_decay_style == "WSD", args.lr_wsd_decay_iters
    if is_wsd and decay is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters N: steps of the decay at the end."
    if not is_wsd and decay is not None:
        yield f"--lr-wsd-decay-iters {decay} needs --lr-decay-style WSD."
    if args.use_checkpoint_opt_param_scheduler and args.override_opt_param_scheduler:
        yield "--use-checkpoint-opt-param-scheduler and --override-opt-param-scheduler exclude each other: keep one."


def weight_decay(args: Namespace) -> Iterator[str]:
    start, end, style = args.start_weight_decay, args.end_weight_decay, args.weight_decay_incr_style
    if style == "constant":
        if start is not None or end is not None:
            yield (
                f"--start-weight-decay {start} and --end-weight-decay {end} need --weight-decay-incr-style linear or "
                "cosine; use --weight-decay for one that stays."
            )
    elif start is None or end is None:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay."
    elif not 0 <= start <= end:
        yield f"--start-weight-decay {start} must be at least 0 and at most --end-weight-decay {end}."
