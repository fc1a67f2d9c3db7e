"""Finds the weights that a run starts with: directory, format and iteration. Finds damage in them before they load.

Called by the trainer, and to check the flags before anything starts. Importing this module imports no torch.
:func:`verify_source` is called on all ranks at once. Each reads its share of the files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from slime.backends.training.arguments import CheckpointArgs
from slime.backends.training.checkpoint_files import (
    CRITIC,
    FAILED_STEPS,
    MANIFEST,
    TRACKER,
    complete_iterations,
    find_damage,
    iteration_directory,
    iteration_of,
    read_manifest,
    what_is_torn,
)
from slime.backends.training.hf_export import MARKER, export_checksums
from slime.utils.errors import ConfigError, kept
from slime.utils.files import LOCK

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

logger = logging.getLogger(__name__)

# what a run leaves that ends before its first checkpoint is complete
_LEFT_BY_US = re.compile(rf"\.?iter_\d{{7}}|\.{TRACKER}\.|(rollout|{CRITIC}|{FAILED_STEPS}|{LOCK})$")
_RELEASE = "release"

_STEP_FLAGS = {
    "--load": "--ckpt-step",
    "--ref-load": "--ref-ckpt-step",
    "--opd-teacher-load": "--opd-teacher-ckpt-step",
}
_NAMED = 4  # damaged files in one message
_ABSENT = re.compile(r"(\S+) from model not in state dict|Missing key in checkpoint state_dict: (\S+)\.")
_WITHOUT = {
    "optimizer.": " (--no-load-optim loads the weights without the optimizer)",
    "rng_state": " (--no-load-rng starts new random number generators from --seed)",
}

DAMAGE = (OSError, KeyError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)
"""Raised by torch when it reads a damaged file."""
# torch has no error class for damage, so its messages are searched for these words
_SIGNS_OF_DAMAGE = (
    "weights_only",
    "Unpickl",
    "EOFError",
    "zip archive",
    "zip file",
    "pickle",
    "metadata read failed",
)

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


def verify_source(source: Source) -> None:
    """Compare all files of ``source`` with the checksums that were taken when it was written. A collective.

    A checkpoint without checksums (of Megatron, of an older version of slime) passes with a notice.

    Raises:
        ConfigError: files are damaged or missing. It names them and the checkpoint before. Raised on all ranks.
    """
    import torch.distributed as dist

    from slime.utils.distributed_utils import files_group

    directory = Path(source.directory)
    record = MARKER if source.format == "hf" else MANIFEST
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    errors: list[Exception] = []
    with kept(errors):  # the other ranks wait in all_gather_object
        checksums = _checksums(source)
        mine = find_damage(directory, checksums, rank, world_size)
        if not checksums and record == MANIFEST and rank == 0:
            logger.warning(
                "%s %s has no checksums: it is loaded as it is, and damage in its tensors would not be noticed.",
                source.flag,
                directory,
            )
    if errors:
        mine = [f"rank {rank} cannot compare it with its checksums ({errors[0]})"]
    everywhere = [mine]
    if world_size > 1:
        everywhere = [[] for _ in range(world_size)]
        dist.all_gather_object(everywhere, mine, group=files_group())
    damage = list(dict.fromkeys(text for one in everywhere for text in one))
    if damage:
        more = f"; and {len(damage) - _NAMED} more files" if len(damage) > _NAMED else ""
        raise ConfigError(
            f"{source.flag} {directory} is damaged: {'; '.join(damage[:_NAMED])}{more} ({record} names what was "
            f"written). {_instead(source)}"
        )


def _checksums(source: Source) -> Mapping[str, str]:
    directory = Path(source.directory)
    if source.format == "hf":
        return export_checksums(directory)
    manifest = read_manifest(directory)
    return {} if manifest is None else manifest.checksums


def unreadable(source: Source, error: BaseException | str) -> ConfigError:
    """The error for a checkpoint without checksums that could not be read because of ``error``."""
    text = error if isinstance(error, str) else _text(error)
    if suspect := _suspect(Path(source.directory)):
        text = f"{suspect} is empty or begins with zeros"
    return ConfigError(f"{source.flag} {source.directory} cannot be read: {text}. {_instead(source)}")


def _suspect(directory: Path) -> str | None:
    """The name of the first file that is empty or begins with zeros. None without such a file."""
    with contextlib.suppress(OSError):  # the caller reports the first error, not this one
        for path in sorted(directory.iterdir()):
            if path.is_file():
                with path.open("rb") as file:
                    if not file.read(16).strip(b"\0"):
                        return path.name
    return None


def unfit(source: Source, error: CheckpointException) -> ConfigError:
    """The error for a checkpoint with other tensors than the model's, or one that torch could not read."""
    if any(_is_of_unpickling(cause) for cause, _ in error.failures.values()):
        return unreadable(source, causes_of(error))
    where = f"{source.flag} {source.directory}"
    return ConfigError(f"{where} does not fit the model and optimizer of this run: {causes_of(error)}")


def causes_of(error: CheckpointException) -> str:
    """The errors of all ranks, without their stacks."""
    return "; ".join(sorted({_text(cause) for cause, _ in error.failures.values()}))


def _text(error: BaseException) -> str:
    """The error in words for the user."""
    if absent := _ABSENT.search(str(error)):  # torch's message lists all tensors that the checkpoint has
        name = (absent[1] or absent[2]).lstrip("\"'")
        hints = (text for prefix, text in _WITHOUT.items() if name.startswith(prefix))
        return f"it has no {name}{next(hints, '')}"
    if _is_of_unpickling(error):
        # torch's message advises to unpickle without its safeguard, which never helps with a damaged file
        return "a file of it is damaged (.metadata, common.pt or a shard): its content is not what was saved"
    return f"{type(error).__name__}: {error}"


def _is_of_unpickling(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}"
    return any(sign in text for sign in _SIGNS_OF_DAMAGE)


def _instead(source: Source) -> str:
    directory = Path(source.directory)
    if source.format == "hf":
        return f"Export or copy it again; if its weights were changed on purpose, delete {MARKER} there."
    number = iteration_of(directory)
    before = [entry for entry in complete_iterations(directory.parent) if (iteration_of(entry) or 0) < (number or 0)]
    if number is None or not before:
        return "There is no complete checkpoint before it: copy it again, or start from another one."
    step = _STEP_FLAGS.get(source.flag)
    use = f"{directory.parent} {step} {iteration_of(before[-1])}" if step else str(before[-1])
    return f"The one before it is {before[-1].name}: {source.flag} {use} takes it."
