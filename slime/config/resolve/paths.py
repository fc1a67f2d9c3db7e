"""Names and paths: one name for the run, and paths that mean the same in every process.

``PATH_FLAGS`` lists every path that the command line names: its kind, and whether a run reads, adds to or replaces it.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slime.algorithms.arguments import needs_reference
from slime.config import groups
from slime.config.groups import flag_of
from slime.utils.errors import ConfigError
from slime.utils.prompt_sources import absolute_source, format_sources, parse_path, parse_sources

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
            setattr(args, flag.name, _absolute_sources(value) if flag.name == "prompt_data" else absolute(value))
    if args.eval_prompt_data and len(args.eval_prompt_data) == 1:
        args.eval_prompt_data = [absolute_source(args.eval_prompt_data[0])]
    elif args.eval_prompt_data and len(args.eval_prompt_data) % 2 == 0:
        pairs = args.eval_prompt_data
        args.eval_prompt_data = [absolute_source(item) if i % 2 else item for i, item in enumerate(pairs)]
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
            groups.warn(args, flag_of(name), f"--dump-details decides: dumps go to {template}")
        setattr(args, name, template)


# ---- checkpoints: sources of the weights of actor and reference, and destinations

_TRACKER = "latest_checkpointed_iteration.txt"


def saving(args: Namespace) -> None:
    if args.save_interval is not None and args.save is None:
        args.save, why = _default_save(args)
        groups.warn(args, "--save", f"not given, but --save-interval is: checkpoints go to {args.save}{why}")
    if args.release_train:
        reason = "1, because --release-train starts every step from a checkpoint"
        for flag, name in (
            ("--save-interval", "save_interval"),
            ("--update-weights-interval", "update_weights_interval"),
        ):
            if vars(args)[name] != 1:
                (groups.warn if name in args.given else groups.info)(args, flag, reason)
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
            groups.info(args, "--load", text)
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
        groups.info(args, "--ref-load", f"not given: the reference model is the one in --load {args.load}")
    elif args.pretrained_checkpoint is not None:
        args.ref_load = args.pretrained_checkpoint
        groups.info(args, "--ref-load", f"not given: the reference model is --pretrained-checkpoint {args.ref_load}")
    elif args.hf_checkpoint is not None:
        args.ref_load = args.hf_checkpoint
        groups.info(args, "--ref-load", f"not given: the reference model is --hf-checkpoint {args.hf_checkpoint}")


def _holds_checkpoint(path: str) -> bool:
    root = Path(path)
    # Megatron's tracker, a Hugging Face directory, or one iteration of torch_dist.
    return (root / _TRACKER).is_file() or (root / "config.json").is_file() or (root / "metadata.json").is_file()


# ---- the list of path flags: read by the steps above, the rules that compare paths, roles and the plan. Functions in
# files (``--custom-rm-path rewards.py:reward``) are not listed: they end in ``_path`` and are only read.


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
            yield UsedPath(flag, given, os.path.realpath(parse_path(given)[0]))


def given_paths(flag: PathFlag, value: Any) -> list[str]:
    """The paths in the value of ``flag``."""
    paths = _eval_files(value) if flag.name == "eval_prompt_data" else [value]
    if flag.name == "prompt_data" and value:
        paths = [source.path for source in parse_sources(value)]
    return [path for path in paths if path]


def absolute(path: str) -> str:
    """The empty path stays empty, so that a rule can report it."""
    return path and os.path.abspath(os.path.expanduser(path))


def _absolute_sources(value: str) -> str:
    return format_sources([replace(source, path=absolute_source(source.path)) for source in parse_sources(value)])


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
