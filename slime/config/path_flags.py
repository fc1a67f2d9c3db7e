"""Every path that the command line names, once: its kind, and whether a run reads, adds to or replaces it.

Read by the steps that make paths absolute, by the rules that compare them, by roles and by the plan. Functions in files
(``--custom-rm-path rewards.py:reward``) are not listed: they end in ``_path`` and are only read.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from slime.config.groups import flag_of

# ``data.jsonl@[0:100]``: the slice is not a part of the path.
_SLICE = re.compile(r"@\[[^\]]*\]$")


@dataclass(frozen=True)
class PathFlag:
    """One flag.

    Attributes:
        does: ``reads``, ``adds`` new files to a directory, or ``replaces`` the file or directory.
        fields: names that a run replaces in ``{...}``.
        is_of_role: ``--megatron-config-path`` may give a role another one.
        what: the plan's name for the content.
    """

    name: str
    does: Literal["reads", "adds", "replaces"]
    is_directory: bool = False
    fields: tuple[str, ...] = ()
    is_of_role: bool = False
    what: str = ""


PATH_FLAGS = (
    PathFlag("hf_checkpoint", "reads", is_directory=True),
    PathFlag("prompt_data", "reads"),
    PathFlag("eval_prompt_data", "reads"),
    PathFlag("load", "reads", is_directory=True, is_of_role=True),
    PathFlag("ref_load", "reads", is_directory=True, is_of_role=True),
    PathFlag("pretrained_checkpoint", "reads", is_directory=True, is_of_role=True),
    PathFlag("initial_megatron_checkpoint", "reads", is_directory=True),
    PathFlag("opd_teacher_load", "reads", is_directory=True, is_of_role=True),
    PathFlag("load_debug_rollout_data", "reads", fields=("rollout_id",)),
    PathFlag("load_forge_rollout_data", "reads", fields=("rollout_id",)),
    PathFlag("eval_config", "reads"),
    PathFlag("custom_config_path", "reads"),
    PathFlag("megatron_config_path", "reads"),
    PathFlag("sglang_config", "reads"),
    PathFlag("output_dir", "adds", is_directory=True),
    PathFlag("save", "adds", is_directory=True, is_of_role=True, what="checkpoint"),
    PathFlag(
        "save_hf",
        "replaces",
        is_directory=True,
        fields=("rollout_id",),
        is_of_role=True,
        what="Hugging Face checkpoint",
    ),
    PathFlag("update_weight_disk_dir", "replaces", is_directory=True, what="weights for the engines"),
    PathFlag("update_weight_local_checkpoint_dir", "replaces", is_directory=True, what="each engine host's weights"),
    PathFlag("save_debug_rollout_data", "replaces", fields=("rollout_id",), what="samples of each rollout"),
    PathFlag("save_debug_train_data", "replaces", fields=("rollout_id", "rank"), what="training data of each rollout"),
    PathFlag("dump_details", "adds", is_directory=True),
    PathFlag("memory_snapshot_dir", "adds", is_directory=True),
    PathFlag("tensorboard_dir", "adds", is_directory=True),
    PathFlag("wandb_dir", "adds", is_directory=True),
)


@dataclass(frozen=True)
class UsedPath:
    """A path of this run. ``path`` is absolute and without symbolic links, with its ``{fields}``."""

    flag: PathFlag
    given: str
    path: str

    def __str__(self) -> str:
        return f"{flag_of(self.flag.name)} {self.given}"


def used_paths(args: Namespace) -> Iterator[UsedPath]:
    """The paths in the resolved arguments. A flag that ``args`` lacks is skipped."""
    for flag in PATH_FLAGS:
        for given in given_paths(flag, vars(args).get(flag.name)):
            # realpath: two names of one directory must compare as equal.
            yield UsedPath(flag, given, os.path.realpath(_SLICE.sub("", given)))


def given_paths(flag: PathFlag, value: Any) -> list[str]:
    """The paths in the value of ``flag``."""
    paths = _eval_files(value) if flag.name == "eval_prompt_data" else [value]
    return [path for path in paths if path]


def absolute(path: str) -> str:
    """The empty path stays empty, so that a rule can report it."""
    return path and os.path.abspath(os.path.expanduser(path))


def absolute_hook(value: Any) -> Any:
    """``file.py`` and ``file.py:function`` below the working directory, also in a list. Other values stay."""
    if isinstance(value, list):
        return [absolute_hook(item) for item in value]
    if not isinstance(value, str):
        return value
    file, colon, function = value.partition(":")
    is_file = file.endswith(".py") and os.path.isfile(os.path.expanduser(file))
    return absolute(file) + colon + function if is_file else value


def _eval_files(value: list[str] | None) -> list[str]:
    """Pairs NAME FILE, or one FILE."""
    return (value or [])[1::2] if len(value or []) > 1 else value or []
