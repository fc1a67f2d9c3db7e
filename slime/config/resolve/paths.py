"""Names and paths: one name for the run, and paths that mean the same in every process."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.config import notices
from slime.config.groups import flag_of
from slime.config.path_flags import PATH_FLAGS, absolute, absolute_hook, given_paths
from slime.utils.errors import ConfigError

_NAMES = ("experiment_name", "tb_experiment_name")
# Bytes of a file name, on the file systems of Linux.
_LONGEST_NAME = 255
# Bytes of a path that leave room for the files of a run below it: Linux has 4096.
_LONGEST_PATH = 3840


def experiment_name(args: Namespace) -> None:
    """Derive the name of the run."""
    # With the process id: several runs may start in the same second.
    started = f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
    args.experiment_name = args.experiment_name or args.tb_experiment_name or started


def absolute_paths(args: Namespace) -> None:
    """Make all paths absolute, because Ray's workers have another working directory."""
    for flag in PATH_FLAGS:
        value = vars(args)[flag.name]
        if isinstance(value, str):
            setattr(args, flag.name, absolute(value))
    if args.eval_prompt_data and len(args.eval_prompt_data) == 1:
        args.eval_prompt_data = [absolute(args.eval_prompt_data[0])]
    elif args.eval_prompt_data and len(args.eval_prompt_data) % 2 == 0:
        pairs = args.eval_prompt_data
        args.eval_prompt_data = [absolute(item) if i % 2 else item for i, item in enumerate(pairs)]
    for name, value in vars(args).items():
        if name.endswith("_path"):  # functions in files
            setattr(args, name, absolute_hook(value))


def usable_names(args: Namespace) -> None:
    """Refuse paths that the file system cannot have, because later steps and rules open them.

    Raises:
        ConfigError: with every name and path of that kind.
    """
    problems = []
    for name in args.given.intersection(_NAMES):  # one is the default of the other
        value = vars(args)[name] or ""
        parts = [value] if name == "experiment_name" else value.split("/")
        reason = "it must be one folder name, without /" if "/" in parts[0] else _unusable(parts)
        if value and reason:
            problems.append(f"{flag_of(name)} {_shortened(value)}: {reason}. Give a short name of letters and digits.")
    for flag in PATH_FLAGS:
        for value in given_paths(flag, vars(args)[flag.name]):
            reason = _unusable(value.split("/")[1:])
            if len(os.fsencode(value)) > _LONGEST_PATH:
                reason = f"it has {len(os.fsencode(value))} bytes, and a path may have {_LONGEST_PATH}"
            if reason:
                problems.append(f"{flag_of(flag.name)} {_shortened(value)}: {reason}. Name another path.")
    if problems:
        raise ConfigError(problems)


def _unusable(parts: Sequence[str]) -> str:
    """The reason why these cannot be names of files and folders, else an empty text."""
    for part in parts:
        size = len(part.encode(errors="surrogateescape"))
        if "\0" in part:
            return "it contains a NUL character, which no file name may have"
        if part in (".", "..") or (not part and len(parts) > 1 and part is not parts[-1]):
            return f"{part!r} is not the name of a folder"
        if size > _LONGEST_NAME:
            return f"{_shortened(part)} has {size} bytes, and a file name may have {_LONGEST_NAME}"
    return ""


def _shortened(text: str) -> str:
    shown = text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"
    return shown if shown.isprintable() else repr(shown)


def debug_dumps(args: Namespace) -> None:
    """``--dump-details`` means both dumps."""
    if args.dump_details is None:
        return
    for name, folder in (("save_debug_rollout_data", "rollout_data"), ("save_debug_train_data", "train_data")):
        template = os.path.join(args.dump_details, folder, "{rollout_id}.pt")
        if vars(args)[name] is not None:
            notices.warn(args, flag_of(name), f"--dump-details decides: dumps go to {template}")
        setattr(args, name, template)


# ---- checkpoints: sources of the weights of actor and reference, and destinations

_TRACKER = "latest_checkpointed_iteration.txt"


def saving(args: Namespace) -> None:
    if args.save_interval is not None and args.save is None:
        args.save, why = _default_save(args)
        notices.warn(args, "--save", f"not given, but --save-interval is: checkpoints go to {args.save}{why}")
    if args.release_train:
        reason = "1, because --release-train starts every step from a checkpoint"
        for flag, name in (
            ("--save-interval", "save_interval"),
            ("--update-weights-interval", "update_weights_interval"),
        ):
            if vars(args)[name] != 1:
                (notices.warn if name in args.given else notices.info)(args, flag, reason)
                setattr(args, name, 1)


def _default_save(args: Namespace) -> tuple[str, str]:
    """``<output-dir>/checkpoints``, unless it holds checkpoints of another run."""
    default = os.path.join(args.output_dir, "checkpoints")
    if not _holds_checkpoint(default) or (args.load and os.path.realpath(args.load) == os.path.realpath(default)):
        return default, ""
    own = os.path.join(args.output_dir, args.experiment_name, "checkpoints")
    return own, f", because {default} holds those of another run; --load {default} goes on with them"


def initial_weights(args: Namespace) -> None:
    """``--initial-megatron-checkpoint`` replaces ``--load`` while that is empty, and an unset ``--ref-load``."""
    initial = args.initial_megatron_checkpoint
    if initial is None or not _holds_checkpoint(initial):  # the checks report a missing one
        return
    if args.ref_load is None:
        args.ref_load = initial
    # Only until the run has saved: then --load continues it.
    if args.load is None or not _holds_checkpoint(args.load):
        text = f"{args.load} holds no checkpoint yet: weights come from --initial-megatron-checkpoint {initial}"
        if args.load is not None:
            notices.info(args, "--load", text)
        args.load = initial
        # Weights only: optimizer, random state and iteration are those of another run.
        args.finetune = args.no_load_optim = args.no_load_rng = True
        args.ckpt_step = None
        if args.start_rollout_id is None:
            args.start_rollout_id = 0


def reference(args: Namespace) -> None:
    """Without --ref-load the reference is the model that training starts from."""
    if args.ref_load is not None or not needs_reference(args):
        return
    # Not a --load that is --save too: after a restart that holds the trained model.
    if args.load is not None and args.load != args.save and _holds_checkpoint(args.load):
        args.ref_load = args.load
        args.ref_ckpt_step = args.ckpt_step if args.ref_ckpt_step is None else args.ref_ckpt_step
        notices.info(args, "--ref-load", f"not given: the reference model is the one in --load {args.load}")
    elif args.pretrained_checkpoint is not None:
        args.ref_load = args.pretrained_checkpoint
        notices.info(args, "--ref-load", f"not given: the reference model is --pretrained-checkpoint {args.ref_load}")
    elif args.hf_checkpoint is not None:
        args.ref_load = args.hf_checkpoint
        notices.info(args, "--ref-load", f"not given: the reference model is --hf-checkpoint {args.hf_checkpoint}")


def needs_reference(args: Any) -> bool:
    """Whether a reference model takes part in the objective, as a loss or in the rewards.

    Args:
        args: the run's arguments, or those of the algorithm alone.
    """
    return bool(args.use_kl_loss or args.kl_coef != 0)


def _holds_checkpoint(path: str) -> bool:
    root = Path(path)
    # Megatron's tracker, a Hugging Face directory, or one iteration of torch_dist.
    return (root / _TRACKER).is_file() or (root / "config.json").is_file() or (root / "metadata.json").is_file()
