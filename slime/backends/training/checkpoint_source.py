"""Finds the weights that a run starts with: directory, format and iteration.

Called by the trainer, and to check the flags before anything starts. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from slime.backends.training.arguments import CheckpointArgs
from slime.backends.training.checkpoint_files import (
    CRITIC,
    FAILED_STEPS,
    TRACKER,
    complete_iterations,
    iteration_directory,
    iteration_of,
    what_is_torn,
)
from slime.utils.errors import ConfigError
from slime.utils.files import LOCK

logger = logging.getLogger(__name__)

# what a run leaves that ends before its first checkpoint is complete
_LEFT_BY_US = re.compile(rf"\.?iter_\d{{7}}|\.{TRACKER}\.|(rollout|{CRITIC}|{FAILED_STEPS}|{LOCK})$")
_RELEASE = "release"


Format: TypeAlias = Literal["torch_dist", "fsdp", "hf"]


@dataclass(frozen=True)
class Source:
    """A checkpoint to read.

    Attributes:
        format: torch_dist is Megatron's distributed layout, fsdp that of the FSDP backend, hf a Hugging Face directory.
        directory: the directory that holds the tensors.
        flag: the flag that named it.
        iteration: of a torch_dist or fsdp checkpoint. 0 for a release.
    """

    format: Format
    directory: str
    flag: str
    iteration: int = 0

    @property
    def is_training_state(self) -> bool:
        """Whether a run wrote it and can go on from it: Hugging Face directories and a release are weights only."""
        return self.format != "hf" and Path(self.directory).name != _RELEASE


def find_start(settings: CheckpointArgs, hf_checkpoint: str) -> Source:
    """Find the checkpoint that a run starts with.

    This is ``--load`` if it holds a checkpoint. If not, it is the first that is given of ``--pretrained-checkpoint``,
    ``--ref-load`` and HF weights, of which only the weights are taken.

    Raises:
        ConfigError: ``--load`` does not exist, holds other files than a checkpoint, or lacks a complete iteration or
            the requested one. Or the other flags lead to no checkpoint.
    """
    if settings.load is not None:
        # a run that resumes itself may start before its directory exists
        is_own = settings.save is not None and Path(settings.load) == Path(settings.save)
        if not Path(settings.load).exists() and not is_own:
            raise ConfigError(
                f"--load {settings.load}: there is no such directory. Name an existing checkpoint; to start afresh now "
                "and resume later, give --save the same directory."
            )
        if not _lacks_actor(Path(settings.load)):
            step = _step(settings.load, settings.ckpt_step)
            source = inspect_checkpoint("--load", settings.load, "--ckpt-step", step)
            if source is not None:
                return source
            # A run that has saved there may also have written other files, such as its exports.
            if not (is_own and Path(settings.load, LOCK).is_file()):
                _refuse_other_files(settings.load)
    if settings.pretrained_checkpoint is not None:
        source = _existing("--pretrained-checkpoint", settings.pretrained_checkpoint, "--ckpt-step", None)
    else:
        source = find_reference(settings, hf_checkpoint)
    if settings.load is not None:
        logger.info(
            "--load %s holds no checkpoint yet: starting from %s %s", settings.load, source.flag, source.directory
        )
    return source


def _lacks_actor(load: Path) -> bool:
    """Whether ``load`` is the critic's directory in the ``--save`` of a run that has no complete checkpoint yet."""
    # the critic is written first
    is_of_run = load.name == CRITIC and (load.parent / LOCK).is_file()
    return is_of_run and inspect_checkpoint("--load", str(load.parent)) is None


def _step(load: str, step: int | None) -> int | None:
    """The iteration of a critic's checkpoint: that of the actor's, which is in the parent directory."""
    root = Path(load)
    if step is not None or root.name != CRITIC or not (root.parent / TRACKER).is_file():
        return step
    # the critic is written first: its newest checkpoint may lack the actor's part
    actor = inspect_checkpoint("--load", str(root.parent))
    if actor is None or what_is_torn(iteration_directory(root, actor.iteration)) is not None:
        return None
    return actor.iteration


def find_reference(settings: CheckpointArgs, hf_checkpoint: str) -> Source:
    """The checkpoint of ``--ref-load``, else that of ``--hf-checkpoint``."""
    if settings.ref_load is not None:
        return _existing("--ref-load", settings.ref_load, "--ref-ckpt-step", settings.ref_ckpt_step)
    return Source("hf", hf_checkpoint, "--hf-checkpoint")


def _existing(flag: str, directory: str, step_flag: str, step: int | None) -> Source:
    source = inspect_checkpoint(flag, directory, step_flag, step)
    if source is None:
        raise ConfigError(f"{flag} {directory} does not exist or holds no checkpoint.")
    return source


def find_teacher(load: str | None, step: int | None) -> Source | None:
    """The checkpoint of ``--opd-teacher-load``. None without the flag."""
    if load is None:
        return None
    return _existing("--opd-teacher-load", load, "--opd-teacher-ckpt-step", step)


def inspect_checkpoint(flag: str, path: str, step_flag: str = "", step: int | None = None) -> Source | None:
    """The latest checkpoint at ``path``, or ``path`` itself if it is one. None without a checkpoint.

    Args:
        step: the iteration to take instead of the latest, by ``step_flag``.
    """
    root = Path(path)
    if root.is_file():
        raise ConfigError(f"{flag} {path} is a file: name the directory of a checkpoint.")
    iteration = iteration_of(root)
    if iteration is not None and (root / "metadata.json").is_file():
        # path names one checkpoint: no other one may be taken in its place
        if torn := what_is_torn(root):
            raise ConfigError(f"{flag} {path} is not a complete checkpoint: {torn}.")
        return _source(flag, root)
    if root.name == _RELEASE and (root / "metadata.json").is_file():
        return _release(flag, root)
    if (root / TRACKER).is_file():
        return _tracked(flag, root, step_flag, step)
    if (root / "config.json").is_file():
        return Source("hf", path, flag)
    # the tracker is the last file of a save: without it the save was interrupted
    if root.is_dir() and (complete := complete_iterations(root)):
        logger.warning(
            "%s %s has no %s; taking the newest complete checkpoint %s.", flag, root, TRACKER, complete[-1].name
        )
        return _source(flag, complete[-1])
    return None


def _refuse_other_files(load: str) -> None:
    foreign = [name for name in os.listdir(load) if not _LEFT_BY_US.match(name)] if os.path.isdir(load) else []
    if foreign:
        raise ConfigError(
            f"--load {load} holds neither {TRACKER} (Megatron) nor config.json (Hugging Face), but other files such as "
            f"{min(foreign)}: name a checkpoint directory, or an empty one to start afresh."
        )


def _tracked(flag: str, root: Path, step_flag: str, step: int | None) -> Source:
    """The iteration ``step``, or the tracker's. If the tracker's is torn, the newest complete one before it."""
    text = (root / TRACKER).read_text(encoding="utf-8").strip()
    if step is None and text == _RELEASE:
        return _release(flag, root / _RELEASE)
    # ASCII: int() takes other digits too, and a damaged file may hold anything
    if step is None and not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ConfigError(f"{flag} {root}: {TRACKER} holds {text[:40]!r}; it must be an iteration or the word release.")
    iteration = int(text) if step is None else step
    directory = iteration_directory(root, iteration)
    torn = what_is_torn(directory)
    if torn is None:
        return _source(flag, directory)
    complete = complete_iterations(root)
    older = [entry for entry in complete if (iteration_of(entry) or 0) < iteration]
    # an iteration that was asked for is never replaced by another one
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
    return Source(_format_of(directory), str(directory), flag, iteration)


def _release(flag: str, directory: Path) -> Source:
    if torn := what_is_torn(directory):
        raise ConfigError(f"{flag} {directory} is not a complete checkpoint: {torn}.")
    return Source(_format_of(directory), str(directory), flag)


def _format_of(directory: Path) -> Format:
    """The format of a complete directory, which has metadata.json."""
    try:
        written_by = json.loads((directory / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend")
    except (ValueError, AttributeError):
        return "torch_dist"  # damaged: reading it raises
    return "fsdp" if written_by == "fsdp" else "torch_dist"


def foreign(source: Source, backend: str) -> str | None:
    """The reason why ``--train-backend`` cannot read ``source``. None if it can."""
    readable = {"megatron": "torch_dist", "fsdp": "fsdp"}[backend]
    if source.format in ("hf", readable):
        return None
    writer = "fsdp" if source.format == "fsdp" else "megatron"
    return (
        f"{source.flag} {source.directory} was written with --train-backend {writer}; --train-backend {backend} reads "
        "its own checkpoints and Hugging Face directories: use an export (--save-hf)."
    )
