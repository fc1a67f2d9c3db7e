"""Flags and rules of ``--train-backend fsdp``. Imports no torch.

A rule returns one sentence per problem; ``RULES`` are checked beside those of every backend.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.config import groups
from slime.config.groups import flag_of
from slime.models.config_json import read_model_config, text_part
from slime.utils.misc import flag


@dataclass(frozen=True)
class FsdpArgs:
    """Trainer on Hugging Face models (--train-backend fsdp)."""

    attn_implementation: str | None = flag(
        None,
        "--train-backend fsdp: attention of transformers (sdpa, eager, flash_attention_2, ...) instead of slime's own, "
        "which attends to packed samples without padding and under context parallelism.",
        metavar="NAME",
    )


_BACKEND = "--train-backend fsdp"

_MODEL_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
)

# Flags that ask for what this backend does not have, and why.
_ABSENT: dict[str, str] = {
    "use_critic": "a critic is trained with --train-backend megatron only",
    "fp16": "there is no loss scale: bf16 is the default, --fp32 the alternative",
    "fp8": "layers of transformers compute in bf16",
    "fp8_param_gather": "layers of transformers compute in bf16",
    "optimizer_cpu_offload": "its states stay on the device",
    "async_save": "training waits for its checkpoints",
    "use_routing_replay": "the routers of transformers decide by themselves",
    "attention_dropout": "models of transformers are trained without dropout",
    "hidden_dropout": "models of transformers are trained without dropout",
    "mtp_num_layers": "models of transformers have no prediction layers",
    "moe_router_bias_update_rate": "the biases of routers stay as they are",
    "only_train_params_name_list": "all parameters are trained",
    "freeze_params_name_list": "all parameters are trained",
    "custom_model_provider_path": "the model is that of transformers",
    "multimodal_keys": "the model has no vision tower",
    "custom_megatron_init_path": "there is no Megatron",
    "custom_megatron_before_log_prob_hook_path": "there is no Megatron",
    "custom_megatron_before_train_step_hook_path": "there is no Megatron",
    "megatron_deepgemm_forward_layers": "there is no Megatron",
    "megatron_deepgemm_moe_forward_layers": "there is no Megatron",
}

# Flags that are not spelled like their names; braces name values of other flags.
_SPELLED = {"use_critic": "--advantage-estimator {advantage_estimator}", "fp8": "--fp8-format"}


def _model_parallelism(args: Namespace) -> Iterator[str]:
    for name in _MODEL_PARALLEL:
        size = vars(args)[name]
        if size is not None and size > 1:
            yield (f"{flag_of(name)} {size} does not work with {_BACKEND}, which shards over all ranks: use 1.")


def _absent_parts(args: Namespace) -> Iterator[str]:
    for name, why in _ABSENT.items():
        value = vars(args)[name]
        if value:
            shown = _SPELLED.get(name, flag_of(name)).format_map(vars(args))
            yield f"{shown} is not supported yet with {_BACKEND}: {why}."
    if args.transformer_impl != "local":
        yield (
            f"--transformer-impl {args.transformer_impl} does not work with {_BACKEND}: the layers are those of "
            "transformers. Leave it out."
        )
    if args.spec and not args.spec[0].startswith("slime_plugins."):  # those of presets have no effect
        yield f"--spec {' '.join(args.spec)} is not supported yet with {_BACKEND}: the model is that of transformers."


def _unread(args: Namespace) -> Iterator[str]:
    """Flags that tune parts of Megatron, and change no result."""
    for name in ["overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size", "use_tp_pp_dp_mapping"]:
        if vars(args)[name]:
            groups.warn(args, flag_of(name), f"no effect with {_BACKEND}")
    yield from ()


def _optimizer(args: Namespace) -> Iterator[str]:
    if args.optimizer.endswith("muon"):
        yield f"--optimizer {args.optimizer} is not supported yet with {_BACKEND}, which shards matrices: use adam."


def _recomputation(args: Namespace) -> Iterator[str]:
    """Every layer is recomputed, or none."""
    granularity = args.recompute_granularity
    if granularity is None:
        return
    is_every_layer = args.recompute_method in (None, "uniform") and args.recompute_num_layers in (None, 1)
    if granularity != "full" or not is_every_layer:
        yield (
            f"--recompute-granularity {granularity} with method {args.recompute_method} and "
            f"{args.recompute_num_layers} layers does not work with {_BACKEND}, which recomputes every layer or none: "
            "use --gradient-checkpointing instead."
        )


def _attention(args: Namespace) -> Iterator[str]:
    if args.attn_implementation is not None and args.context_parallel_size > 1:
        yield (
            f"--attn-implementation {args.attn_implementation} sees one rank's tokens only: drop it, or use "
            "--context-parallel-size 1."
        )
    config = text_part(read_model_config(args.hf_checkpoint))
    if args.attn_implementation is None and _has_windows(config):
        yield (
            f"--hf-checkpoint {args.hf_checkpoint} has layers with sliding windows, which slime's attention does not "
            f"have: use --attn-implementation sdpa with {_BACKEND}."
        )
    if config.get("index_topk") is not None:
        yield (
            f"--hf-checkpoint {args.hf_checkpoint} has sparse attention, which is not supported yet with {_BACKEND}, "
            "whose attention sees all keys: use --train-backend megatron."
        )


def _has_windows(config: dict[str, Any]) -> bool:
    """Whether a layer of the model in ``config.json`` sees the last keys only."""
    if config.get("layer_types"):
        return "sliding_attention" in config["layer_types"]
    is_qwen = str(config.get("model_type")).startswith("qwen")  # its configuration has them off by default
    if config.get("sliding_window") is None or not config.get("use_sliding_window", not is_qwen):
        return False
    return bool(config.get("max_window_layers", 0) < config.get("num_hidden_layers", 1))


RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (
    _model_parallelism,
    _absent_parts,
    _unread,
    _optimizer,
    _recomputation,
    _attention,
)
"""One problem is one sentence: flag, value, rule, fix."""
