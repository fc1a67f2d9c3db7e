"""Names and paths: one name for the run, and paths that mean the same in every process."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from typing import Any

from slime.config import notices
from slime.config.groups import flag_of
from slime.config.path_flags import PATH_FLAGS

__all__ = ["absolute_paths", "debug_dumps", "experiment_name"]


def experiment_name(args: Namespace) -> None:
    """Its own also when several start in one second."""
    started = f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
    args.experiment_name = args.experiment_name or args.tb_experiment_name or started


def absolute_paths(args: Namespace) -> None:
    """Ray's workers have another working directory."""
    for flag in PATH_FLAGS:
        value = getattr(args, flag.name)
        if isinstance(value, str):
            setattr(args, flag.name, _absolute(value))
    if args.eval_prompt_data and len(args.eval_prompt_data) == 1:
        args.eval_prompt_data = [_absolute(args.eval_prompt_data[0])]
    elif args.eval_prompt_data and len(args.eval_prompt_data) % 2 == 0:
        pairs = args.eval_prompt_data
        args.eval_prompt_data = [_absolute(item) if i % 2 else item for i, item in enumerate(pairs)]
    for name, value in vars(args).items():
        if name.endswith("_path"):  # D1: functions in files
            setattr(args, name, [_hook(item) for item in value] if isinstance(value, list) else _hook(value))


def debug_dumps(args: Namespace) -> None:
    """B21: one directory stands for both dumps."""
    if args.dump_details is None:
        return
    for name, folder in (("save_debug_rollout_data", "rollout_data"), ("save_debug_train_data", "train_data")):
        template = os.path.join(args.dump_details, folder, "{rollout_id}.pt")
        if getattr(args, name) is not None:
            notices.warn(args, flag_of(name), f"--dump-details decides: dumps go to {template}")
        setattr(args, name, template)


def _absolute(path: str) -> str:
    """The empty path stays what it is: the checks name it."""
    return path and os.path.abspath(os.path.expanduser(path))


def _hook(value: Any) -> Any:
    """``file.py`` and ``file.py:function`` below the working directory; anything else stays."""
    if not isinstance(value, str):
        return value
    file, colon, function = value.partition(":")
    is_file = file.endswith(".py") and os.path.isfile(os.path.expanduser(file))
    return _absolute(file) + colon + function if is_file else value
