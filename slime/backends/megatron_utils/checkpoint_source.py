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
from slime.utils.errors import ConfigError

__all__ = ["TRACKER", "Source", "check_checkpoints", "find_reference", "find_start", "iteration_directory"]

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7})")


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


def iteration_directory(root: str, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def find_start(args: CheckpointArgs, hf_checkpoint: str) -> Source:
    """``--load`` if it holds a checkpoint; while it is missing or holds none yet, ``--ref-load``, else HF weights.

    Raises:
        ConfigError: ``--load`` holds files that are no checkpoint, or lacks the iteration that was asked for.
    """
    if args.load is not None:
        source = _inspect("--load", args.load, "--ckpt-step", args.ckpt_step)
        if source is not None:
            return source
    source = find_reference(args, hf_checkpoint)
    if args.load is not None:
        logger.info("--load %s holds no checkpoint yet: starting from %s %s", args.load, source.flag, source.directory)
    return source


def find_reference(args: CheckpointArgs, hf_checkpoint: str) -> Source:
    """``--ref-load``, else ``--hf-checkpoint``."""
    if args.ref_load is not None:
        source = _inspect("--ref-load", args.ref_load, "--ref-ckpt-step", args.ref_ckpt_step)
        if source is None:
            raise ConfigError(f"--ref-load {args.ref_load} does not exist or holds no checkpoint.")
        return source
    return Source("hf", hf_checkpoint, "--hf-checkpoint")


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


def _inspect(flag: str, path: str, step_flag: str, step: int | None) -> Source | None:
    """The checkpoint at ``path``; None when there is none yet."""
    root = Path(path)
    named = _ITERATION.fullmatch(root.name)
    if named and (root / "metadata.json").is_file():
        return Source("torch_dist", path, flag, int(named.group(1)))
    if (root / TRACKER).is_file():
        return _tracked(flag, root, step_flag, step)
    if (root / "config.json").is_file():
        return Source("hf", path, flag)
    foreign = [entry.name for entry in root.iterdir() if not _is_ours(entry)] if root.is_dir() else []
    if foreign:
        raise ConfigError(
            f"{flag} {path} holds neither {TRACKER} (Megatron) nor config.json (Hugging Face), but other files such as "
            f"{sorted(foreign)[0]}: name a checkpoint directory, or an empty one to start afresh."
        )
    return None


def _is_ours(entry: Path) -> bool:
    """What an interrupted first save leaves: it does not count as a checkpoint."""
    return _ITERATION.search(entry.name) is not None or entry.name == "rollout"


def _tracked(flag: str, root: Path, step_flag: str, step: int | None) -> Source:
    text = (root / TRACKER).read_text(encoding="utf-8").strip()
    if step is None and text == "release":
        return Source("torch_dist", str(root / "release"), flag)
    if step is None and not text.isdecimal():
        raise ConfigError(f"{flag} {root}: {TRACKER} holds {text!r}; it must be an iteration or the word release.")
    iteration = int(text) if step is None else step
    directory = iteration_directory(str(root), iteration)
    if not (directory / "metadata.json").is_file():
        present = sorted(entry.name for entry in root.glob("iter_*") if (entry / "metadata.json").is_file())
        asked = f"{TRACKER} names" if step is None else f"{step_flag} asks for"
        raise ConfigError(
            f"{flag} {root}: {asked} iteration {iteration}, but {directory.name} is not a complete checkpoint. "
            f"Complete are: {', '.join(present) or 'none'}."
        )
    return Source("torch_dist", str(directory), flag, iteration)
