"""Rules over the resolved arguments about files of the trainer: checkpoints, exports and adapters. Imports no torch."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.algorithms.arguments import needs_reference
from slime.backends.training.adapter_files import adapter_problems, describe_adapter, state_problems
from slime.backends.training.arguments import CheckpointArgs
from slime.backends.training.checkpoint_files import complete_iterations
from slime.backends.training.checkpoint_source import Source, find_start, foreign
from slime.backends.training.hf_export import foreign_content, refusal
from slime.config import groups
from slime.config.groups import from_args
from slime.models.hf_shape import read_shape
from slime.models.lora import LoraConfig
from slime.models.shape import ModelShape
from slime.utils.errors import ConfigError

_NUMBER = re.compile(r"\{rollout_id[^}]*\}")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def resumed_from(args: Namespace) -> Source | None:
    """The checkpoint of a run that these resolved arguments continue. None if they start a run."""
    source = find_start(from_args(CheckpointArgs, args), args.hf_checkpoint)
    return source if source.flag == "--load" and source.is_training_state and not args.finetune else None


def nothing_left(args: Namespace) -> str | None:
    """The reason why a run with these resolved arguments has no rollout left to train. None if it has one."""
    source = resumed_from(args)
    if source is None or not args.num_rollout or args.start_rollout_id is not None:
        return None
    if source.iteration < args.num_rollout - 1:
        return None
    return (
        f"{args.num_rollout}: {source.directory} was saved after the last of them, so nothing is left to train; a "
        "larger number goes on, another --save and no --load starts anew"
    )


def check_checkpoints(args: Namespace) -> list[str]:
    """Rule over the resolved arguments: the problems that ``find_start`` would find, before anything starts.

    Leaves notices if the run has nothing to do, or if it would replace another one.
    """
    if args.hf_checkpoint is None:
        return []
    checkpoints = from_args(CheckpointArgs, args)
    is_missing = checkpoints.ref_load is not None and not Path(checkpoints.ref_load).is_dir()
    if is_missing and (checkpoints.ref_load == args.hf_checkpoint or needs_reference(args)):
        return []  # another rule reports it
    try:
        source = find_start(checkpoints, args.hf_checkpoint)
    except ConfigError as error:
        return error.problems
    if (reason := nothing_left(args)) is not None:
        groups.warn(args, "--num-rollout", reason)
    elif (last := resumed_from(args)) is not None and args.num_rollout and args.start_rollout_id is None:
        left = args.num_rollout - last.iteration - 1
        groups.info(args, "--num-rollout", f"{last.directory} has {last.iteration + 1} of them, and {left} are left")
    # realpath: one directory may be named in two ways
    is_own = (
        args.load is not None and args.save is not None and os.path.realpath(args.load) == os.path.realpath(args.save)
    )
    if args.save is not None and not is_own and (old := complete_iterations(Path(args.save))):
        text = f"{args.save} holds {old[-1].name} of another run, and this run replaces those of its own rollouts there"
        groups.warn(args, "--save", f"{text}; --load {args.save} goes on with it, another --save leaves it alone")
    problem = foreign(source, args.train_backend)
    return [problem] if problem else []


def check_export(args: Namespace) -> Iterator[str]:
    """Rules over the resolved arguments: every directory that ``--save-hf`` would replace is an export."""
    if args.push_to_hub is not None:
        flag = f"--push-to-hub {args.push_to_hub}"
        if not _REPOSITORY.fullmatch(args.push_to_hub):
            yield f"{flag} must name a repository with its owner: --push-to-hub me/my-model."
        if not args.save_hf:
            yield f"{flag} uploads the exports of --save-hf: give --save-hf DIR as well, or drop it."
    if not args.save_hf:
        return
    for target in _existing_targets(args):
        if reason := foreign_content(target):
            yield f"--save-hf {refusal(str(target), reason)}"


def _existing_targets(args: Namespace) -> list[Path]:
    """The existing directories among those that this run would write."""
    template = Path(args.save_hf)
    if not _NUMBER.search(args.save_hf):
        return [template]
    try:
        if args.num_rollout is None:  # it depends on the prompts: the export itself looks again
            return []
        first, last = _first_rollout(args), args.num_rollout - 1
        interval = args.save_interval or args.num_rollout
        numbers = (number for number in range(first, last + 1) if (number + 1) % interval == 0 or number == last)
        paths = (Path(args.save_hf.format(rollout_id=number)) for number in numbers)
        return [path for path in paths if path.exists()]
    except (KeyError, IndexError, ValueError):  # the rule on templates reports it
        return []


def _first_rollout(args: Namespace) -> int:
    if args.start_rollout_id is not None:
        return int(args.start_rollout_id)
    try:
        source = resumed_from(args)
    except ConfigError:  # check_checkpoints reports it
        return 0
    return 0 if source is None else source.iteration + 1


def check_adapters(args: Namespace) -> Iterator[str]:
    """Rule over the resolved arguments: targets, rank, base, and the adapter that training starts from."""
    lora = LoraConfig.of(vars(args))
    if lora is None:
        yield from _without_rank(args)
        yield from _load_problems(args, None)
        return
    flag = f"--lora-rank {lora.rank}"
    if lora.rank < 0:
        yield f"{flag} must be positive, or 0 to train all weights."
        return
    if not 0 <= lora.dropout < 1:
        yield f"--lora-dropout {lora.dropout} must be at least 0 and less than 1."
    if lora.alpha <= 0:
        yield f"--lora-alpha {lora.alpha} must be positive."
    yield from _excluded(args, flag)
    if args.hf_checkpoint is None or args.debug_rollout_only:
        return
    try:
        shape = read_shape(args.hf_checkpoint)
    except ConfigError:  # reported by the rules of the model
        return
    try:
        lora.targets(shape)
    except ConfigError as error:
        yield from error.problems
        return
    _warn_of_peft(args, lora, shape)
    if lora.adapter_path is not None:
        yield from adapter_problems(lora, shape, args.hf_checkpoint)
    yield from _load_problems(args, describe_adapter(lora, shape, args.hf_checkpoint))


def _warn_of_peft(args: Namespace, lora: LoraConfig, shape: ModelShape) -> None:
    mlps = {one.leaf for one in lora.targets(shape) if ".mlp." in one.rule.megatron and not one.rule.is_expert}
    if shape.moe is not None and mlps and not lora.merge:
        groups.warn(
            args,
            "--lora-target-modules",
            f"in most models with experts peft 0.21 takes {', '.join(sorted(mlps))} for names of routed experts, so "
            "PeftModel.from_pretrained loads wrong adapters. Engines and tools/merge_lora.py use the right ones.",
        )


def _load_problems(args: Namespace, current: Mapping[str, Any] | None) -> list[str]:
    if args.load is None or args.hf_checkpoint is None or args.debug_rollout_only:
        return []
    try:
        source = find_start(from_args(CheckpointArgs, args), args.hf_checkpoint)
    except ConfigError:  # check_checkpoints reports it
        return []
    if source.flag != "--load":
        return []
    if source.format != "hf":
        return state_problems(source, current)
    if current is None:
        return []
    return [
        f"--load {args.load} is a Hugging Face directory: with --lora-rank the base is --hf-checkpoint. Drop --load."
    ]


def _without_rank(args: Namespace) -> Iterator[str]:
    for name in ("lora_adapter_path", "lora_target_modules", "lora_experts", "lora_merge", "lora_use_rslora"):
        if vars(args).get(name):
            yield f"--{name.replace('_', '-')} needs --lora-rank: without it all weights are trained."


def _excluded(args: Namespace, flag: str) -> Iterator[str]:
    """Combinations that would train something else than adapters of the weights that the engines have."""
    base = Path(args.hf_checkpoint or "").resolve()
    for name in ("ref_load", "pretrained_checkpoint"):
        given = vars(args)[name]
        if given is not None and Path(given).resolve() != base:
            yield (
                f"{flag}: --{name.replace('_', '-')} {given} is another base than that of the engines, "
                f"--hf-checkpoint {args.hf_checkpoint}: drop it. The reference is the base without adapters."
            )
    if args.only_train_params_name_list or args.freeze_params_name_list:
        yield f"{flag} freezes all weights: drop --only-train-params-name-list and --freeze-params-name-list."
    if args.opd_teacher_load is not None:
        yield f"{flag}: --opd-teacher-load needs a copy of all weights: serve the teacher (--opd-type sglang) instead."
    if args.enable_mtp_training:
        yield f"{flag} trains adapters of the decoder only: drop --enable-mtp-training."
    if args.fp8 is not None or args.transformer_impl == "transformer_engine":
        yield f"{flag} needs layers of Megatron: give --transformer-impl local and no --fp8-format."
    if args.megatron_deepgemm_forward_layers or args.megatron_deepgemm_moe_forward_layers:
        yield f"{flag}: --megatron-deepgemm-forward-layers multiplies as engines without adapters do: drop it."
    if args.int4_group_size is not None:
        yield f"{flag} does not work with fake INT4: unset OPEN_TRAINING_INT4_FAKE_QAT_FLAG."
    if args.lora_experts and (args.expert_tensor_parallel_size or 1) > 1:
        size = args.expert_tensor_parallel_size
        yield f"--lora-experts with --expert-tensor-parallel-size {size}: experts with adapters are not cut. Give 1."
    if args.lora_experts and args.train_backend == "fsdp":
        yield (
            "--lora-experts does not work with --train-backend fsdp: models of transformers hold the experts of a "
            "layer in one tensor. Use --train-backend megatron, or drop it."
        )
    if args.moe_router_bias_update_rate:
        yield f"{flag} keeps the routers: drop --moe-router-bias-update-rate {args.moe_router_bias_update_rate}."
