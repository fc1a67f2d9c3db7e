"""Where the weights of a run come from: which directory, in which format, at which iteration.

Called by the trainer, and by whoever wants to check the flags before anything starts. Imports no torch.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.backends.megatron_utils.arguments import CheckpointArgs
from slime.backends.megatron_utils.checkpoint_files import (
    CRITIC,
    TRACKER,
    complete_iterations,
    iteration_directory,
    iteration_of,
    what_is_torn,
)
from slime.utils.errors import ConfigError

__all__ = [
    "TRACKER",
    "Source",
    "check_checkpoints",
    "find_reference",
    "find_start",
    "find_teacher",
    "inspect_checkpoint",
    "iteration_directory",
]

logger = logging.getLogger(__name__)

_LEFT_BY_US = re.compile(r"\.?iter_\d{7}")


@dataclass(frozen=True)
class Source:
    """A checkpoint to read.

    Attributes:
        format: torch_dist is Megatron's distributed layout, hf a Hugging Face directory.
        directory: the directory that holds the tensors.
        flag: the flag that named it.
        iteration: of a torch_dist checkpoint; 0 for a release.
    """

    format: Literal["torch_dist", "hf"]
    directory: str
    flag: str
    iteration: int = 0


def find_start(args: CheckpointArgs, hf_checkpoint: str) -> Source:
    """``--load`` if it holds a checkpoint; while it is empty, ``--ref-load``, else HF weights.

    A run that resumes itself (``--load`` is ``--save``) may start before the directory exists.

    Raises:
        ConfigError: ``--load`` does not exist, holds files that are no checkpoint, or lacks a complete iteration or
            the one that was asked for.
    """
    if args.load is not None:
        is_own = args.save is not None and Path(args.load) == Path(args.save)
        if not Path(args.load).exists() and not is_own:
            raise ConfigError(
                f"--load {args.load}: there is no such directory. Name an existing checkpoint; to start afresh now and "
                f"resume later, give --save the same directory."
            )
        source = _inspect("--load", args.load, "--ckpt-step", _step(args.load, args.ckpt_step))
        if source is not None:
            return source
    source = find_reference(args, hf_checkpoint)
    if args.load is not None:
        logger.info("--load %s holds no checkpoint yet: starting from %s %s", args.load, source.flag, source.directory)
    return source


def _step(load: str, step: int | None) -> int | None:
    """A critic's checkpoints lie below the actor's and are written before them: the actor's says which one counts."""
    root = Path(load)
    if step is not None or root.name != CRITIC or not (root.parent / TRACKER).is_file():
        return step
    actor = _inspect("--load", str(root.parent), "--ckpt-step", None)
    if actor is None or what_is_torn(iteration_directory(root, actor.iteration)) is not None:
        return None
    return actor.iteration


def find_reference(args: CheckpointArgs, hf_checkpoint: str) -> Source:
    """``--ref-load``, else ``--hf-checkpoint``."""
    if args.ref_load is not None:
        source = _inspect("--ref-load", args.ref_load, "--ref-ckpt-step", args.ref_ckpt_step)
        if source is None:
            raise ConfigError(f"--ref-load {args.ref_load} does not exist or holds no checkpoint.")
        return source
    return Source("hf", hf_checkpoint, "--hf-checkpoint")


def find_teacher(load: str | None, step: int | None) -> Source | None:
    """``--opd-teacher-load``; None when the flag is not given."""
    if load is None:
        return None
    source = _inspect("--opd-teacher-load", load, "--opd-teacher-ckpt-step", step)
    if source is None:
        raise ConfigError(f"--opd-teacher-load {load} does not exist or holds no checkpoint.")
    return source


def check_checkpoints(args: object) -> list[str]:
    """Rule over the resolved arguments: what ``find_start`` would refuse, before anything starts."""
    from slime.config.groups import from_args

    if getattr(args, "hf_checkpoint", None) is None:
        return []
    try:
        find_start(from_args(CheckpointArgs, args), args.hf_checkpoint)  # type: ignore[arg-type, attr-defined]
    except ConfigError as error:
        return error.problems
    return []


def inspect_checkpoint(flag: str, path: str) -> Source | None:
    """The latest checkpoint at ``path``, or ``path`` itself if it is one; None when there is none."""
    return _inspect(flag, path, "", None)


def _inspect(flag: str, path: str, step_flag: str, step: int | None) -> Source | None:
    """The checkpoint at ``path``; None when there is none yet."""
    root = Path(path)
    if root.is_file():
        raise ConfigError(f"{flag} {path} is a file: name the directory of a checkpoint.")
    iteration = iteration_of(root)
    if iteration is not None and (root / "metadata.json").is_file():
        if torn := what_is_torn(root):
            raise ConfigError(f"{flag} {path} is not a complete checkpoint: {torn}.")
        return Source("torch_dist", path, flag, iteration)
    if root.name == "release" and (root / "metadata.json").is_file():
        return _release(flag, root)
    if (root / TRACKER).is_file():
        return _tracked(flag, root, step_flag, step)
    if (root / "config.json").is_file():
        return Source("hf", path, flag)
    if root.is_dir() and (complete := complete_iterations(root)):
        logger.warning(
            "%s %s has no %s; taking the newest complete checkpoint %s.", flag, root, TRACKER, complete[-1].name
        )
        return _source(flag, complete[-1])
    foreign = [entry.name for entry in root.iterdir() if not _is_ours(entry)] if root.is_dir() else []
    if foreign:
        raise ConfigError(
            f"{flag} {path} holds neither {TRACKER} (Megatron) nor config.json (Hugging Face), but other files such as "
            f"{sorted(foreign)[0]}: name a checkpoint directory, or an empty one to start afresh."
        )
    return None


def _is_ours(entry: Path) -> bool:
    """What an interrupted first save leaves: it does not count as a checkpoint."""
    return _LEFT_BY_US.match(entry.name) is not None or entry.name in ("rollout", f".{TRACKER}.partial")


def _tracked(flag: str, root: Path, step_flag: str, step: int | None) -> Source:
    """The iteration that was asked for, or the tracker's; if that one is torn, the newest complete one before it."""
    text = (root / TRACKER).read_text(encoding="utf-8").strip()
    if step is None and text == "release":
        return _release(flag, root / "release")
    if step is None and not text.isdecimal():
        raise ConfigError(f"{flag} {root}: {TRACKER} holds {text!r}; it must be an iteration or the word release.")
    iteration = int(text) if step is None else step
    directory = iteration_directory(root, iteration)
    torn = what_is_torn(directory)
    if torn is None:
        return _source(flag, directory)
    complete = complete_iterations(root)
    older = [entry for entry in complete if (iteration_of(entry) or 0) < iteration]
    if step is not None or not older:
        asked = f"{TRACKER} names" if step is None else f"{step_flag} asks for"
        raise ConfigError(
            f"{flag} {root}: {asked} iteration {iteration}, but {directory.name} is not a complete checkpoint: {torn}. "
            f"Complete are: {', '.join(entry.name for entry in complete) or 'none'}."
        )
    logger.warning(
        "%s %s: %s, the latest checkpoint, is not complete: %s. Falling back to %s.",
        flag,
        root,
        directory.name,
        torn,
        older[-1].name,
    )
    return _source(flag, older[-1])


def _source(flag: str, directory: Path) -> Source:
    iteration = iteration_of(directory)
    assert iteration is not None, f"{directory} is no iteration's directory"
    return Source("torch_dist", str(directory), flag, iteration)


def _release(flag: str, directory: Path) -> Source:
    if torn := what_is_torn(directory):
        raise ConfigError(f"{flag} {directory} is not a complete checkpoint: {torn}.")
    return Source("torch_dist", str(directory), flag)
