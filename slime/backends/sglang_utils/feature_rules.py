"""Start-up flags of engines that serve a LoRA adapter or draft tokens, and rules about both. Imports no torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slime.backends.sglang_utils.topology import ModelSpec
from slime.config import groups
from slime.config.groups import from_args
from slime.data.engine_fields import ADAPTER_NAME, FieldFlags
from slime.models.config_json import read_model_config
from slime.models.hf_shape import read_shape
from slime.models.lora import LoraConfig
from slime.utils import accelerator
from slime.utils.errors import ConfigError

# The adapter, and the base model, which requests without an adapter use.
_SLOTS = 2
_MERGE = "or add --lora-merge, with which engines get whole weights"
# Layers that SGLang fuses. It reads the adapter of the first of them, and expects those of the others beside it.
_NEEDS = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
    "q_a_proj": ("kv_a_proj_with_mqa",),
    "kv_a_proj_with_mqa": ("q_a_proj",),
}
_SERVED = {*_NEEDS, "o_proj", "gate_proj", "down_proj", "q_b_proj", "kv_b_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
# A chain of drafts: SGLang reserves memory for a tree of them.
_DRAFTS = {"--speculative-num-draft-tokens": "8", "--speculative-ngram-max-bfs-breadth": "1"}


def adapter_flags(args: Namespace) -> dict[str, Any]:
    """SGLang's flags for the adapter of this run. Values are texts, numbers, lists, or None for a switch."""
    config = LoraConfig.of(vars(args))
    assert config is not None, "serves_adapter(args)"
    flags: dict[str, Any] = {
        "--enable-lora": None,
        "--max-lora-rank": config.rank,
        "--max-loras-per-batch": _SLOTS,
        "--lora-target-modules": config.module_names(read_shape(args.hf_checkpoint)),
    }
    # SGLang's default needs triton
    return flags | ({"--lora-backend": "torch_native"} if accelerator.current().is_cpu else {})


def adapter_words(args: Namespace) -> list[str]:
    """:func:`adapter_flags` as words of a command line."""
    return [word for name, value in adapter_flags(args).items() for word in (name, *words_of(value))]


def words_of(value: Any) -> list[str]:
    """The words after a flag. None for a switch."""
    return [] if value is None else [str(word) for word in value] if isinstance(value, list) else [str(value)]


def served_adapter(args: Namespace) -> Iterator[str]:
    """The engines can serve the adapter, and the user's ``--sglang-*`` flags do not contradict it."""
    config = LoraConfig.of(vars(args))
    if config is not None and args.debug_rollout_only:
        groups.warn(args, "--lora-rank", "no effect with --debug-rollout-only: engines serve --hf-checkpoint")
    if config is None or not serves_adapter(args) or args.debug_train_only:
        return
    if args.sglang_quantization is not None or read_model_config(args.hf_checkpoint).get("quantization_config"):
        yield (
            f"--lora-rank {config.rank}: slime does not serve adapters of quantized engines (--hf-checkpoint "
            f"{args.hf_checkpoint}, --sglang-quantization {args.sglang_quantization}). Use an unquantized checkpoint, "
            f"{_MERGE}."
        )
    try:
        names = config.module_names(read_shape(args.hf_checkpoint))
    except ConfigError as error:
        if args.train_backend == "fsdp":  # the rules of the other backend report it
            yield f"--lora-rank {config.rank}: {error}"
        return
    yield from _modules(names)
    yield from _engine_flags(args, config, names)


def _modules(names: list[str]) -> Iterator[str]:
    if unknown := sorted(set(names) - _SERVED):
        yield (
            f"--lora-target-modules {', '.join(unknown)}: SGLang cannot serve adapters of these layers. Leave them "
            f"out, {_MERGE}."
        )
    for name in names:
        if missing := [other for other in _NEEDS.get(name, ()) if other not in names]:
            yield (
                f"--lora-target-modules {name} without {', '.join(missing)}: SGLang fuses these layers and would drop "
                f"the adapter. Add them, {_MERGE}."
            )


def _engine_flags(args: Namespace, config: LoraConfig, names: list[str]) -> Iterator[str]:
    flags = vars(args)
    given = {name.removeprefix("sglang_"): flags.get(name) for name in args.given if name.startswith("sglang_")}
    yield from _server_fields(config, names, given, lambda field: f"--sglang-{field.replace('_', '-')}")
    if flags.get("sglang_dp_size", 1) > 1:
        yield _one_copy(f"--sglang-dp-size {args.sglang_dp_size}")
    if args.update_weight_mode == "delta":
        yield (
            f"--update-weight-mode delta does not work with --lora-rank: an adapter is sent whole. Use full, {_MERGE}."
        )


def adapter_of_model(args: Namespace, model: ModelSpec) -> Iterator[str]:
    """The engines of an entry of ``--sglang-config`` can serve the adapter, if the run trains the entry."""
    config = LoraConfig.of(vars(args))
    if config is None or not serves_adapter(args) or args.debug_train_only or not model.updates_weights:
        return
    if model.model_path != args.hf_checkpoint:
        yield (
            f"model_path {model.model_path} with update_weights: an adapter of --hf-checkpoint {args.hf_checkpoint} is "
            f"trained, which another base cannot serve. Leave model_path out, {_MERGE}."
        )
        return
    try:
        names = config.module_names(read_shape(args.hf_checkpoint))
    except ConfigError:  # reported by served_adapter
        return
    for fields in (group.overrides for group in model.groups):
        yield from _server_fields(config, names, fields, lambda field: f"overrides: {field}")
        if (fields.get("dp_size") or 1) > 1:
            yield _one_copy(f"overrides: dp_size {fields['dp_size']}")
        if fields.get("quantization") is not None:
            yield (
                f"overrides: quantization {fields['quantization']}: slime does not serve adapters of quantized "
                f"engines. Leave it out, {_MERGE}."
            )


def _server_fields(
    config: LoraConfig, names: list[str], given: Mapping[str, Any], spelled: Callable[[str], str]
) -> Iterator[str]:
    """Fields of the server that were ``given``, under the names that the user wrote, do not contradict the adapter."""
    rank, slots, modules = (given.get(name) for name in ("max_lora_rank", "max_loras_per_batch", "lora_target_modules"))
    if rank is not None and rank < config.rank:
        yield f"{spelled('max_lora_rank')} {rank} is less than --lora-rank {config.rank}: leave it out, it follows."
    if slots is not None and slots < _SLOTS:
        yield f"{spelled('max_loras_per_batch')} {slots} must be at least {_SLOTS}: the adapter and the base model."
    if modules is not None and "all" not in modules and (missing := sorted(set(names) - set(modules))):
        yield (
            f"{spelled('lora_target_modules')} {' '.join(modules)} lacks {', '.join(missing)} of "
            "--lora-target-modules: leave it out, it follows."
        )
    if (given.get("tokenizer_worker_num") or 1) > 1:
        yield (
            f"{spelled('tokenizer_worker_num')} {given['tokenizer_worker_num']} does not work with --lora-rank: only "
            f"the process that loads an adapter would know its name. Leave it out, {_MERGE}."
        )
    if given.get("enable_lora") is False:
        yield f"{spelled('enable_lora')} false does not work with --lora-rank: leave it out, it follows."
    if given.get("lora_paths"):
        yield (
            f"{spelled('lora_paths')} does not work with --lora-rank: a run serves one adapter, {ADAPTER_NAME!r}, "
            "which it trains. Leave it out. --num-rollout 0 --lora-adapter-path DIR evaluates another one."
        )


def _one_copy(flag: str) -> str:
    return (
        f"{flag} does not work with --lora-rank: SGLang replaces adapters of one copy of the model only. Use more "
        f"engines instead, {_MERGE}."
    )


def problems_of_server(args: Namespace, seen: Mapping[str, Any]) -> Iterator[str]:
    """The reasons why a server that others started, with the arguments ``seen``, cannot serve the adapter."""
    if not serves_adapter(args):
        return
    flags = adapter_flags(args)
    words = " ".join(adapter_words(args))
    modules = set(seen.get("lora_target_modules") or ())
    is_wide = (seen.get("max_lora_rank") or 0) >= args.lora_rank and seen.get("max_loras_per_batch", 8) >= _SLOTS
    if not seen.get("enable_lora"):
        yield f"it serves no adapters: start it with {words}."
    elif (seen.get("tokenizer_worker_num") or 1) > 1:
        yield "only one of its HTTP processes would know the adapter: start it without --tokenizer-worker-num."
    elif not is_wide or not ("all" in modules or modules >= set(flags["--lora-target-modules"])):
        yield (
            f"its adapters have at most rank {seen.get('max_lora_rank')}, {seen.get('max_loras_per_batch')} at a time, "
            f"in {' '.join(sorted(modules))}: start it with {words}."
        )


def experts_on_cpu(args: Namespace) -> Iterator[str]:
    """SGLang's LoRA of experts needs triton. It wraps the experts as soon as any MLP has an adapter."""
    config = LoraConfig.of(vars(args))
    if config is None or not serves_adapter(args) or args.debug_train_only or not accelerator.current().is_cpu:
        return
    try:
        shape = read_shape(args.hf_checkpoint)
        names = config.module_names(shape)
    except ConfigError:
        return
    if shape.moe is not None and (mlps := sorted(_MLP & set(names))):
        yield (
            f"--lora-target-modules {', '.join(mlps)}: engines on a CPU cannot serve adapters of the MLPs of a model "
            f"with experts. Leave them out, {_MERGE}."
        )


def draft_flags(user: Sequence[str]) -> dict[str, str]:
    """SGLang's flags of an engine on a CPU for drafts, if the ``user``'s words turn them on. Those have priority."""
    return _DRAFTS if {"NGRAM", "--speculative-algorithm=NGRAM"} & set(user) else {}


def drafts_on_cpu(args: Namespace) -> Iterator[str]:
    """Engines on a CPU draft from history alone, for models with ordinary attention."""
    algorithm = args.sglang_speculative_algorithm
    if not algorithm or args.rollout_external_engine_addrs or args.debug_train_only:
        return
    if not accelerator.current().is_cpu:
        return
    flag = f"--sglang-speculative-algorithm {algorithm}"
    if algorithm != "NGRAM":
        # SGLang 0.5.23 has no kernels there that verify drafts by sampling: eagle_utils._verify_uses_greedy
        yield (
            f"{flag}: without a GPU, SGLang replaces samples by the most probable token, so the run would not train on "
            "samples of the policy. Use NGRAM, whose drafts are verified by sampling, or drop it here."
        )
        return
    width = args.rollout_num_gpus_per_engine
    parts = {
        "--use-rollout-routing-replay": args.use_rollout_routing_replay,
        f"--rollout-num-gpus-per-engine {width}": width > 1,
        "a LoRA adapter in the engines": serves_adapter(args),
        f"the attention of --hf-checkpoint {args.hf_checkpoint}": _has_other_attention(args.hf_checkpoint),
    }
    for part, is_given in parts.items():
        if is_given:
            yield f"{flag} on a CPU is not supported with {part}: drop one of them."


def _has_other_attention(hf_checkpoint: str) -> bool:
    try:
        shape = read_shape(hf_checkpoint)
    except ConfigError:  # reported elsewhere
        return False
    return any(part is not None for part in (shape.mla, shape.sparse, shape.delta_net, shape.vision))


def serves_adapter(args: Namespace) -> bool:
    return from_args(FieldFlags, args).serves_adapter
