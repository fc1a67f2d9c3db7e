"""Where the weights of actor and reference come from, and where checkpoints go."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.config import notices

__all__ = ["initial_weights", "needs_reference", "reference", "saving"]

_TRACKER = "latest_checkpointed_iteration.txt"


def saving(args: Namespace) -> None:
    """B11, B45, D10."""
    if args.save_interval is not None and args.save is None:
        args.save, why = _default_save(args)
        notices.warn(args, "--save", f"not given, but --save-interval is: checkpoints go to {args.save}{why}")
    if args.release_train:
        reason = "1, because --release-train starts every step from a checkpoint"
        for flag, name in (
            ("--save-interval", "save_interval"),
            ("--update-weights-interval", "update_weights_interval"),
        ):
            if getattr(args, name) != 1:
                (notices.warn if name in args.given else notices.info)(args, flag, reason)
                setattr(args, name, 1)


def _default_save(args: Namespace) -> tuple[str, str]:
    """``<output-dir>/checkpoints``, unless that holds checkpoints which this run does not go on with."""
    default = os.path.join(args.output_dir, "checkpoints")
    if not _holds_checkpoint(default) or (args.load and os.path.realpath(args.load) == os.path.realpath(default)):
        return default, ""
    own = os.path.join(args.output_dir, args.experiment_name, "checkpoints")
    return own, f", because {default} holds those of another run; --load {default} goes on with them"


def initial_weights(args: Namespace) -> None:
    """``--initial-megatron-checkpoint`` stands in for ``--load`` while that holds nothing, and for ``--ref-load``."""
    initial = args.initial_megatron_checkpoint
    if initial is None or not _holds_checkpoint(initial):  # what is missing is found by the checks
        return
    if args.ref_load is None:
        args.ref_load = initial
    if args.load is None or not _holds_checkpoint(args.load):
        text = f"{args.load} holds no checkpoint yet: weights come from --initial-megatron-checkpoint {initial}"
        if args.load is not None:
            notices.info(args, "--load", text)
        args.load = initial
        args.finetune = args.no_load_optim = args.no_load_rng = True
        args.ckpt_step = None
        if args.start_rollout_id is None:
            args.start_rollout_id = 0


def reference(args: Namespace) -> None:
    """D9: without --ref-load the reference is where training starts.

    Not a --load that is --save too: after a restart that holds the trained model, and the reference would be another.
    """
    if args.ref_load is not None or not needs_reference(args):
        return
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
    return (root / _TRACKER).is_file() or (root / "config.json").is_file() or (root / "metadata.json").is_file()
