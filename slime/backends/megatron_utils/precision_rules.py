"""Rules of training in low precision: what the machine and the checkpoint must have. Called by ``argument_rules``.

INT4 has no flag: launch scripts switch it on with ``OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1``. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Iterator

from slime.backends.megatron_utils.hf_shape import read_hf_config
from slime.utils import accelerator
from slime.utils.errors import ConfigError

__all__ = ["deepgemm", "fp8", "int4", "int4_group_size"]

_INT4 = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
_INT4_GROUP = "OPEN_TRAINING_INT4_GROUP_SIZE"
_INT4_DEFAULT_GROUP = 128


def fp8(args: Namespace) -> Iterator[str]:
    """FP8 products are TransformerEngine's, on a GPU."""
    if args.fp8 is None:
        for name in ("fp8_recipe", "fp8_quantizer_factory", "fp8_param_gather"):
            if name in args.given and getattr(args, name):
                value = "" if name == "fp8_param_gather" else f" {getattr(args, name)}"
                yield f"--{name.replace('_', '-')}{value} needs --fp8-format."
        return
    flag = f"--fp8-format {args.fp8}"
    if accelerator.current().is_cpu:
        yield f"{flag} needs a GPU with TransformerEngine; this run is on a CPU. Leave it out to train in bf16."
    elif importlib.util.find_spec("transformer_engine") is None:
        yield f"{flag} needs the package transformer_engine, which is not installed. Leave it out to train in bf16."
    if not args.bf16:
        yield f"{flag} is for weights in bf16: drop --fp16 or --fp32."
    if (args.fp8_recipe == "custom") != (args.fp8_quantizer_factory is not None):
        yield "--fp8-recipe custom and --fp8-quantizer-factory package.module.function need each other."
    if args.fp8_param_gather:
        yield from _fp8_weights(args)


def _fp8_weights(args: Namespace) -> Iterator[str]:
    """Megatron's sharded optimizer alone writes weights in FP8."""
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
    if accelerator.current().is_cpu:
        yield f"{used[0]} needs a GPU of compute capability 9.0 or more; this run is on a CPU. Leave it out."
    elif importlib.util.find_spec("deep_gemm") is None:
        yield f"{used[0]} needs the package deep_gemm, which is not installed: pip install sgl-deep-gemm."
    if not args.bf16:
        yield f"{used[0]} is for weights in bf16: drop --fp16 or --fp32."
    if args.fp8 is not None:
        yield f"{used[0]} and --fp8-format {args.fp8} exclude each other: a product is one or the other."
    if args.int4_group_size is not None:
        yield f"{used[0]} and {_INT4}=1 exclude each other: a product is one or the other."


def int4_group_size(args: Namespace) -> None:
    """A step: values of a row that share a scale, or None without fake INT4.

    Raises:
        ConfigError: a variable is neither on nor off, or no size.
    """
    switch, size = os.environ.get(_INT4, "0"), os.environ.get(_INT4_GROUP, str(_INT4_DEFAULT_GROUP))
    if switch not in ("", "0", "1"):
        raise ConfigError(f"{_INT4}={switch} in the environment: 1 is on, 0 is off.")
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(f"{_INT4_GROUP}={size} in the environment must be a number of columns, such as 128.")
    args.int4_group_size = int(size) if switch == "1" else None


def int4(args: Namespace) -> Iterator[str]:
    """Experts are rounded as the engines' are: the checkpoint says how."""
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
        quantization = read_hf_config(args.hf_checkpoint).get("quantization_config") or {}
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
