"""The marker of a Hugging Face directory that slime exported: its files, and that an export may replace it.

    <save-hf>/slime_export.json    names of all files, checksums of those with weights

An export replaces a directory with this marker whose entries it all wrote itself, an empty directory, or nothing.
Anything else holds files of the user. The marker is written before the directory gets its name, so every export
has it. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.backends.training.checkpoint_files import make_empty
from slime.utils.errors import ConfigError
from slime.utils.files import replace_directory

MARKER = "slime_export.json"
_FORMAT = 1
# written by the store of weight versions, whose full versions are exports
_WRITTEN_LATER = ("slime_weights.json",)


def begin_export(path: str) -> Path:
    """Check the target, and make the empty directory beside it that is written first.

    Raises:
        ConfigError: ``path`` holds other files than those of an export.
    """
    target = Path(path)
    if reason := foreign_content(target):
        raise ConfigError(refusal(path, reason))
    partial, old = beside(path, "partial"), beside(path, "old")
    if old.is_dir() and not target.exists():  # a process died between the two renames
        old.rename(target)
    make_empty(partial)
    return partial


def finish_export(path: str, checksums: Mapping[str, str]) -> None:
    """Mark the directory that :func:`begin_export` made, and give it its name. It replaces an earlier export."""
    write_marker(beside(path, "partial"), checksums)
    target = Path(path)
    if reason := foreign_content(target):  # the weights took their time: look again before they replace it
        raise ConfigError(refusal(path, reason))
    replace_directory(target, beside(path, "partial"), beside(path, "old"))


def beside(path: str, end: str) -> Path:
    """The hidden directory ``.<name>.<end>`` next to ``path``."""
    target = Path(path)
    return target.with_name(f".{target.name}.{end}")


def write_marker(directory: Path, checksums: Mapping[str, str]) -> None:
    """Mark ``directory``, in which everything else is written, as an export."""
    names = sorted(path.name for path in directory.iterdir())
    content = {"format": _FORMAT, "files": names, "checksums": dict(checksums)}
    (directory / MARKER).write_text(json.dumps(content, indent=2), encoding="utf-8")


def foreign_content(target: Path) -> str | None:
    """The reason why an export must not replace ``target``, as the end of a sentence. None if it may."""
    # exists() is false for a link to nothing
    if not target.exists() and not target.is_symlink():
        return None
    if target.is_symlink() or not target.is_dir():
        return "is a link" if target.is_symlink() else "is a file"
    if target.is_mount():
        return "is a mount point, which cannot be renamed"
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return None
    if MARKER not in names:
        return f"holds {names[0]} and no {MARKER}: these are other files, or an export of an older version of slime"
    try:
        content = _read_marker(target)
    except ConfigError as error:
        return f"may hold other files than those of an export: {error}"
    written = {MARKER, *_WRITTEN_LATER, *content["files"]}
    if added := [name for name in names if name not in written]:
        return f"holds {added[0]}, which no export wrote"
    return None


def export_checksums(directory: Path) -> Mapping[str, str]:
    """Checksums of an export's weight files. Empty if ``directory`` has no marker.

    Raises:
        ConfigError: the marker is damaged or cannot be read.
    """
    checksums: Mapping[str, str] = _read_marker(directory)["checksums"] if (directory / MARKER).exists() else {}
    return checksums


def refusal(path: str, reason: str) -> str:
    return (
        f"{path} {reason}. An export replaces the whole directory: name a new or an empty one, or move this one away."
    )


def _read_marker(directory: Path) -> Any:
    """The content of the marker, a dictionary with ``files`` and ``checksums``."""
    path = directory / MARKER
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None
    is_ours = isinstance(content, dict) and content.get("format") == _FORMAT
    if not is_ours or not isinstance(content.get("files"), list) or not isinstance(content.get("checksums"), dict):
        raise ConfigError(f"{path} is damaged: it must be of format {_FORMAT}, with files and checksums")
    return content
