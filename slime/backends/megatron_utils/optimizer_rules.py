"""Rules of the optimizer and of low precision: flags, machine, checkpoint. For ``argument_rules`` and ``slime.ray``.

A rule returns one sentence per problem. Fake quantization has no flags: launch scripts set
``OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1``, ``DSA_KV_FP8_QAT=1``. Imports neither torch nor megatron.
"""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata

from slime.backends.training.arguments import ParallelArgs
from slime.config.groups import from_args
from slime.models.config_json import load_model_config
from slime.models.hf_shape import read_shape
from slime.utils import accelerator
from slime.utils.errors import ConfigError

_INT4 = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
_INT4_GROUP = "OPEN_TRAINING_INT4_GROUP_SIZE"
_KV = "DSA_KV_FP8_QAT"
_KV_BLOCK = "DSA_KV_FP8_QAT_BLOCK_SIZE"
_DEFAULT_SIZE = "128"
_ENGINE = "transformer-engine"
_FLEX = "--moe-token-dispatcher-type flex"


def uses_transformer_engine(args: Namespace) -> bool:
    """Whether layers are Transformer Engine's. The flags decide, not the presence of the package."""
    return args.fp8 is not None or args.transformer_impl == "transformer_engine"


def has_te_attention(args: Namespace, *, is_latent: bool) -> bool:
    """Whether attention is Transformer Engine's. Otherwise it is that of ``training.attention``.

    That one is exact in fp32, has the same bits in two runs, and exchanges the latents of context-parallel ranks, which
    are narrower than the keys that a ring exchanges. It also reads keys of other samples (``--share-prefixes``).
    """
    is_gathered = is_latent and args.context_parallel_size > 1
    is_named = args.attention_backend in ("local", "fa3", "fa4")
    is_ours = is_gathered or is_named or args.deterministic_mode or args.fp32
    shares_prefixes = bool(vars(args).get("share_prefixes"))  # programs for one checkpoint have no such flag
    return uses_transformer_engine(args) and not is_ours and not shares_prefixes


def fp8(args: Namespace) -> Iterator[str]:
    """FP8 products are TransformerEngine's, on a GPU."""
    if args.fp8 is None:
        for name in ("fp8_recipe", "fp8_quantizer_factory", "fp8_param_gather"):
            if name in args.given and vars(args)[name]:
                value = "" if name == "fp8_param_gather" else f" {vars(args)[name]}"
                yield f"--{name.replace('_', '-')}{value} needs --fp8-format."
        return
    flag = f"--fp8-format {args.fp8}"
    if "transformer_impl" in args.given and args.transformer_impl != "transformer_engine":
        yield f"{flag} needs --transformer-impl transformer_engine, not {args.transformer_impl}: drop one of them."
    if not args.bf16:
        yield f"{flag} is for weights in bf16: drop --fp16 or --fp32."
    if (args.fp8_recipe == "custom") != (args.fp8_quantizer_factory is not None):
        yield "--fp8-recipe custom and --fp8-quantizer-factory package.module.function need each other."
    if args.fp8_param_gather:
        yield from _fp8_weights(args)


def transformer_engine(args: Namespace) -> Iterator[str]:
    """The implementation of layers."""
    flag = f"--transformer-impl {args.transformer_impl}"
    if args.transformer_impl == "inference_optimized":
        yield f"{flag} is for inference, and this trainer does not have it: use local or transformer_engine."
    if args.transformer_impl == "transformer_engine" and args.fp8 is None:
        if args.int4_group_size is not None:
            yield f"{flag} and {_INT4}=1 exclude each other: the products of fake INT4 are those of local layers."
        for name in ("forward", "moe-forward"):
            if vars(args)[f"megatron_deepgemm_{name.replace('-', '_')}_layers"]:
                yield f"{flag} and --megatron-deepgemm-{name}-layers exclude each other: it multiplies in local layers."
    if _has_flex_dispatcher(args):
        tensor = args.tensor_model_parallel_size
        per_expert = tensor if args.expert_tensor_parallel_size is None else args.expert_tensor_parallel_size
        if args.expert_model_parallel_size * per_expert == 1:
            yield f"{_FLEX} needs several ranks of experts, and --expert-model-parallel-size 1 has one: leave it out."


def _has_flex_dispatcher(args: Namespace) -> bool:
    return bool(args.num_experts) and args.moe_token_dispatcher_type == "flex"


def _fp8_weights(args: Namespace) -> Iterator[str]:
    # Only Megatron's sharded optimizer writes weights in FP8.
    if args.optimizer != "adam" or not args.use_distributed_optimizer:
        yield "--fp8-param-gather needs --optimizer adam and --use-distributed-optimizer."
    if args.optimizer_cpu_offload:
        yield "--fp8-param-gather and --optimizer-cpu-offload exclude each other: its update writes 16-bit weights."
    if args.fp8_recipe == "mxfp8":
        yield (
            "--fp8-param-gather is not supported with --fp8-recipe mxfp8, whose weights Megatron gathers by way of the "
            "gradient buffer: use blockwise, or leave it out."
        )


def deepgemm(args: Namespace) -> Iterator[str]:
    """Products of the package deep_gemm in the forward pass, as the engines make them."""
    given = {
        "forward": (args.megatron_deepgemm_forward_layers, args.megatron_deepgemm_forward_modules),
        "moe-forward": (args.megatron_deepgemm_moe_forward_layers, args.megatron_deepgemm_moe_forward_modules),
    }
    for which, (layers, modules) in given.items():
        flag = f"--megatron-deepgemm-{which}-layers"
        if modules and not layers:
            yield f"--megatron-deepgemm-{which}-modules {' '.join(modules)} needs {flag}."
        for layer in layers or ():
            if layer < 0 or (args.num_layers is not None and layer >= args.num_layers):
                yield f"{flag} {layer} must be a layer of the model, from 0 to {(args.num_layers or 1) - 1}."
    used = [f"--megatron-deepgemm-{which}-layers" for which, (layers, _) in given.items() if layers]
    if not used:
        return
    if not args.bf16:
        yield f"{used[0]} is for weights in bf16: drop --fp16 or --fp32."
    if args.fp8 is not None:
        yield f"{used[0]} and --fp8-format {args.fp8} exclude each other: a product is one or the other."
    if args.int4_group_size is not None:
        yield f"{used[0]} and {_INT4}=1 exclude each other: a product is one or the other."


def low_precision_here(args: Namespace) -> Iterator[str]:
    """Requirements of low precision on the machine that trains."""
    is_cpu = accelerator.current().is_cpu
    if args.fp8 is not None:
        yield from _transformer_engine_here(f"--fp8-format {args.fp8}", "Leave it out to train in bf16.", is_cpu=is_cpu)
    elif args.transformer_impl == "transformer_engine":
        yield from _transformer_engine_here(
            "--transformer-impl transformer_engine", "Leave it out to use local layers.", is_cpu=is_cpu
        )
    if _has_flex_dispatcher(args) and not is_cpu and importlib.util.find_spec("deep_ep") is None:
        yield (
            f"{_FLEX} needs the package deep_ep (https://github.com/deepseek-ai/DeepEP), which is not installed. Give "
            "--moe-token-dispatcher-type alltoall to exchange tokens over NCCL."
        )
    if args.megatron_deepgemm_forward_layers or args.megatron_deepgemm_moe_forward_layers:
        kind = "forward" if args.megatron_deepgemm_forward_layers else "moe-forward"
        flag = f"--megatron-deepgemm-{kind}-layers"
        if is_cpu:
            yield f"{flag} needs a GPU of compute capability 9.0 or more; this machine has none. Leave it out."
        elif importlib.util.find_spec("deep_gemm") is None:
            yield f"{flag} needs the package deep_gemm, which is not installed: pip install sgl-deep-gemm."


def _transformer_engine_here(flag: str, fix: str, *, is_cpu: bool) -> Iterator[str]:
    """The package in a version that megatron-core names in its metadata."""
    from packaging.requirements import Requirement

    if is_cpu:
        yield f"{flag} needs a GPU with TransformerEngine; this machine has none. {fix}"
        return
    if importlib.util.find_spec("transformer_engine") is None:
        yield f"{flag} needs the package transformer_engine, which is not installed. {fix}"
        return
    try:
        found = metadata.version(_ENGINE)
    except metadata.PackageNotFoundError:  # a build that was not installed as a package
        found = "0"
    requirements = [Requirement(line) for line in metadata.requires("megatron-core") or []]
    for requirement in requirements:
        if requirement.name == _ENGINE and not requirement.specifier.contains(found, prereleases=True):
            yield (
                f"{flag} needs {_ENGINE} {requirement.specifier}, the versions that megatron-core "
                f"{metadata.version('megatron-core')} supports, and {found} is installed: pip install "
                f"--no-build-isolation '{_ENGINE}[core_cu13,pytorch]{requirement.specifier}'. {fix}"
            )


def fake_quantization(args: Namespace) -> None:
    """A step: values that share a scale, or None if nothing is rounded.

    Raises:
        ConfigError: a variable is neither on nor off, or no size.
    """
    args.int4_group_size = _size_if_on(_INT4, _INT4_GROUP)
    args.kv_fp8_block_size = _size_if_on(_KV, _KV_BLOCK)


def _size_if_on(switch: str, size: str) -> int | None:
    is_on, columns = os.environ.get(switch, "0"), os.environ.get(size, _DEFAULT_SIZE)
    if is_on not in ("", "0", "1"):
        raise ConfigError(f"{switch}={is_on} in the environment: 1 is on, 0 is off.")
    if not columns.isdecimal() or int(columns) < 1:
        raise ConfigError(f"{size}={columns} in the environment must be a number of columns, such as {_DEFAULT_SIZE}.")
    return int(columns) if is_on == "1" else None


def int4(args: Namespace) -> Iterator[str]:
    """Experts are rounded like the engines': the checkpoint has the format."""
    if args.int4_group_size is None:
        return
    where = f"{_INT4}=1"
    if args.train_backend != "megatron":
        yield f"{where} is not supported with --train-backend {args.train_backend}; use megatron."
    if args.fp8 is not None:
        yield f"{where} and --fp8-format {args.fp8} exclude each other: an expert's products are in one or the other."
    if args.fp32:
        yield f"{where} and --fp32 exclude each other: the engines' scales have 16 bits, and so must the trainer's."
    try:
        quantization = load_model_config(args.hf_checkpoint).get("quantization_config") or {}
    except ConfigError:
        return  # reported elsewhere
    if quantization.get("format") != "pack-quantized":
        yield (
            f"{where} trains experts for engines that hold them in INT4, and --hf-checkpoint {args.hf_checkpoint} is "
            "not of compressed-tensors' format pack-quantized. Convert it with tools/convert_hf_to_int4_direct.py, or "
            "unset the variable."
        )
        return
    groups = quantization.get("config_groups") or {}
    sizes = {(group.get("weights") or {}).get("group_size") for group in groups.values()}
    if sizes != {args.int4_group_size}:
        yield (
            f"{_INT4_GROUP}={args.int4_group_size}: --hf-checkpoint {args.hf_checkpoint} has groups of "
            f"{', '.join(map(str, sorted(sizes, key=str)))}; the trainer must round as its engines do."
        )


def kv_fp8(args: Namespace) -> Iterator[str]:
    """Latent key-values are rounded as in the engines' FP8 cache."""
    if args.kv_fp8_block_size is None:
        return
    if args.train_backend != "megatron":
        yield f"{_KV}=1 is not supported with --train-backend {args.train_backend}; use megatron."
    try:
        is_sparse = read_shape(args.hf_checkpoint).sparse is not None
    except ConfigError:
        return  # reported elsewhere
    if not is_sparse:
        yield (
            f"{_KV}=1 rounds the key-values of sparse attention, which the model of --hf-checkpoint "
            f"{args.hf_checkpoint} does not have: unset it."
        )


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
