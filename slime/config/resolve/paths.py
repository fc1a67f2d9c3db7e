"""Names and paths: one name for the run, and paths that mean the same in every process."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Sequence

from slime.config import notices
from slime.config.groups import flag_of
from slime.config.path_flags import PATH_FLAGS, absolute, absolute_hook, given_paths
from slime.utils.errors import ConfigError

__all__ = ["absolute_paths", "debug_dumps", "experiment_name", "usable_names"]

_NAMES = ("experiment_name", "tb_experiment_name")
_LONGEST_NAME = 255
"""Bytes of a file name, on the file systems of Linux."""
_LONGEST_PATH = 3840
"""Bytes of a path that leave room for the files of a run below it: Linux has 4096."""


def experiment_name(args: Namespace) -> None:
    """Its own also when several start in one second."""
    started = f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
    args.experiment_name = args.experiment_name or args.tb_experiment_name or started


def absolute_paths(args: Namespace) -> None:
    """Ray's workers have another working directory."""
    for flag in PATH_FLAGS:
        value = getattr(args, flag.name)
        if isinstance(value, str):
            setattr(args, flag.name, absolute(value))
    if args.eval_prompt_data and len(args.eval_prompt_data) == 1:
        args.eval_prompt_data = [absolute(args.eval_prompt_data[0])]
    elif args.eval_prompt_data and len(args.eval_prompt_data) % 2 == 0:
        pairs = args.eval_prompt_data
        args.eval_prompt_data = [absolute(item) if i % 2 else item for i, item in enumerate(pairs)]
    for name, value in vars(args).items():
        if name.endswith("_path"):  # D1: functions in files
            setattr(args, name, absolute_hook(value))


def usable_names(args: Namespace) -> None:
    """What the file system cannot have fails here: other steps and rules look at these paths.

    Raises:
        ConfigError: with every name and path of that kind.
    """
    problems = []
    for name in args.given.intersection(_NAMES):  # one of them may stand for the other
        value = getattr(args, name) or ""
        parts = [value] if name == "experiment_name" else value.split("/")
        reason = "it must be one folder name, without /" if "/" in parts[0] else _unusable(parts)
        if value and reason:
            problems.append(f"{flag_of(name)} {_shortened(value)}: {reason}. Give a short name of letters and digits.")
    for flag in PATH_FLAGS:
        for value in given_paths(flag, getattr(args, flag.name)):
            reason = _unusable(value.split("/")[1:])
            if len(os.fsencode(value)) > _LONGEST_PATH:
                reason = f"it has {len(os.fsencode(value))} bytes, and a path may have {_LONGEST_PATH}"
            if reason:
                problems.append(f"{flag_of(flag.name)} {_shortened(value)}: {reason}. Name another path.")
    if problems:
        raise ConfigError(problems)


def _unusable(parts: Sequence[str]) -> str:
    """Why these cannot be names of files and folders; empty where they can."""
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
    """B21: one directory stands for both dumps."""
    if args.dump_details is None:
        return
    for name, folder in (("save_debug_rollout_data", "rollout_data"), ("save_debug_train_data", "train_data")):
        template = os.path.join(args.dump_details, folder, "{rollout_id}.pt")
        if getattr(args, name) is not None:
            notices.warn(args, flag_of(name), f"--dump-details decides: dumps go to {template}")
        setattr(args, name, template)
