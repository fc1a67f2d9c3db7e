"""Checkpoint directories: what must exist, and how often to write."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.config.resolve.checkpoints import needs_reference

__all__ = ["RULES"]


def _directories(args: Namespace) -> Iterator[str]:
    """B3, B6."""
    has_reference = needs_reference(args)
    cause = "--use-kl-loss" if args.use_kl_loss else f"--kl-coef {args.kl_coef}"
    if has_reference and args.ref_load is None and args.hf_checkpoint is not None:
        yield f"{cause} needs a reference model: give --ref-load DIR."
    if has_reference and args.ref_load is not None and not Path(args.ref_load).is_dir():
        yield f"--ref-load {args.ref_load}: there is no such directory, and {cause} needs a reference model."
    for flag, path in (
        ("--opd-teacher-load", args.opd_teacher_load),
        ("--initial-megatron-checkpoint", args.initial_megatron_checkpoint),
    ):
        if path is not None and not Path(path).is_dir():
            yield f"{flag} {path}: there is no such directory."


def _saving(args: Namespace) -> Iterator[str]:
    """B61, D11."""
    if args.save is not None and args.save_interval is None and args.num_rollout != 0:
        yield "--save needs --save-interval N: how often to write a checkpoint (the last rollout is always saved)."


RULES = (_directories, _saving)
