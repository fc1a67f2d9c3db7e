"""Finds damage in a checkpoint before a tensor is loaded, and names the checkpoint to use instead.

Called on all ranks at once. Each reads its share of the files (``checksums``).
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.training.checkpoint_files import (
    MANIFEST,
    complete_iterations,
    find_damage,
    iteration_of,
    read_manifest,
)
from slime.backends.training.checkpoint_source import Source
from slime.backends.training.hf_export import MARKER, export_checksums
from slime.utils.distributed_utils import files_group
from slime.utils.errors import ConfigError, kept

logger = logging.getLogger(__name__)

_STEP_FLAGS = {
    "--load": "--ckpt-step",
    "--ref-load": "--ref-ckpt-step",
    "--opd-teacher-load": "--opd-teacher-ckpt-step",
}
_NAMED = 4

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
    "Expected input to be a checkpoint",
)


def verify_source(source: Source) -> None:
    """Compare all files of ``source`` with the checksums that were taken when it was written. A collective.

    A checkpoint without checksums (of Megatron, of an older version of slime) passes with a notice.

    Raises:
        ConfigError: files are damaged or missing. It names them and the checkpoint before. Raised on all ranks.
    """
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
    if refused := re.search(r"GLOBAL (\S+) (was not allowed|whose module)", str(error)):
        return f"a file of it (.metadata, common.pt or a shard) names {refused[1]}, which would run when it is read"
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
