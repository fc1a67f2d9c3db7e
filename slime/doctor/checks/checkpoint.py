"""The checkpoint: complete, not truncated, and the one that the flags resume from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from slime.config.plan.render import size
from slime.doctor.finding import Finding, Situation, fail, ok

__all__ = ["resume", "weights"]

_INDEX = "model.safetensors.index.json"
_DOWNLOAD = "download it again: hf download <model> --local-dir {0}"


def weights(situation: Situation) -> Iterator[Finding]:
    """Every file of the index is there and as long as its header says."""
    path = situation.args.hf_checkpoint if situation.args is not None else None
    if path is None or not Path(path).is_dir():
        return  # the arguments' own checks say so
    root, fix = Path(path), _DOWNLOAD.format(path)
    try:
        files = _files(root)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield fail("weights", f"{root / _INDEX} cannot be read: {error}", fix)
        return
    if not files:
        yield fail("weights", f"{path} holds no .safetensors file", fix)
        return
    missing = [name for name in files if not (root / name).is_file()]
    if missing:
        yield fail("weights", f"{len(missing)} of {len(files)} files are missing: {_listed(missing)}", fix)
    torn = [name for name in files if name not in missing and not _is_whole(root / name)]
    if torn:
        yield fail("weights", f"truncated or damaged: {_listed(torn)}", fix)
    if not missing and not torn:
        total = sum(os.path.getsize(root / name) for name in files)
        yield ok("weights", f"complete: {len(files)} x .safetensors, {size(total)} ({path})")


def resume(situation: Situation) -> Iterator[Finding]:
    """Which checkpoint training would start from."""
    from slime.backends.megatron_utils.arguments import CheckpointArgs
    from slime.backends.training.checkpoint_source import find_start
    from slime.config.groups import from_args
    from slime.utils.errors import ConfigError

    args = situation.args
    if args is None or args.debug_rollout_only or args.hf_checkpoint is None:
        return
    try:
        source = find_start(from_args(CheckpointArgs, args), args.hf_checkpoint)
    except ConfigError as error:
        yield fail("start", str(error), "")
        return
    where = f"iteration {source.iteration} of {source.directory}" if source.format == "torch_dist" else source.directory
    yield ok("start", f"training starts from {where} ({source.flag})")


def _files(root: Path) -> list[str]:
    """Weight files by the index; without one, those that are there."""
    if not (root / _INDEX).is_file():
        return sorted(file.name for file in root.glob("*.safetensors"))
    index = json.loads((root / _INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _is_whole(file: Path) -> bool:
    """Whether the header can be read, and the tensors that it names end where the file does."""
    try:
        with safe_open(file, framework="np"):
            return True
    except SafetensorError:
        return False


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
