"""Writes the files around a checkpoint's tensors, and finds complete, latest and outdated checkpoints.

    <save>/iter_0000012/                       shards, .metadata, metadata.json, common.pt
    <save>/iter_0000012/manifest.json          what belongs to it, with sizes and checksums: the directory's last file
    <save>/latest_checkpointed_iteration.txt   "12": the last file of all
    <save>/rollout/...                         state of the Data Buffer, by rollout
    <save>/critic/iter_0000012/                the same for a critic: written first, so that the actor's counts for both

A directory is written under another name and renamed when its manifest is in place, so one without a manifest was not
written by us (Megatron's own checkpoints) and is taken as it is. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.utils.files import replace_directory, replacing

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
CRITIC = "critic"
FAILED_STEPS = "failed_steps"
"""Folder of the batches whose step failed or was skipped, beside the checkpoints."""
_FORMAT = 1
_REMOVED = ".removed"
_ITERATION = re.compile(r"iter_(\d{7})")


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        iteration: number of the directory: the id of the last rollout that was trained on.
        weight_version: version under which engines serve these weights: the number of rollouts they were trained on.
        layout: parallel sizes of the run that wrote it. Any others can read it.
        content: what besides the weights is inside.
        files: sizes in bytes, by name inside the directory.
        checksums: of ``checksums.checksum``, by name inside the directory. Empty in checkpoints of older versions.
        data_state: file of the Data Buffer's state, relative to the directory's parent, with its size. Empty if none.
        has_critic: a critic's checkpoint of the same iteration belongs to it.
    """

    iteration: int
    weight_version: str
    layout: Mapping[str, int]
    content: Mapping[str, Any]
    files: Mapping[str, int]
    data_state: Mapping[str, int] = field(default_factory=dict)
    has_critic: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict)
    format: int = _FORMAT

    @property
    def rollout_id(self) -> int:
        return self.iteration


def iteration_directory(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def iteration_of(directory: Path) -> int | None:
    """Number of an iteration's directory. None for any other name."""
    named = _ITERATION.fullmatch(directory.name)
    return int(named.group(1)) if named else None


def write_manifest(
    directory: Path,
    iteration: int,
    *,
    root: Path,
    layout: Mapping[str, int],
    content: Mapping[str, Any],
    weight_version: str | None = None,
    checksums: Mapping[str, str] | None = None,
) -> Manifest:
    """Describe ``directory`` as it is now. Atomic: the manifest is there and whole, or not there.

    Args:
        checksums: those that are known already, of the files that other ranks wrote. The others are computed.
        weight_version: by default that of a run that has trained on the rollouts up to ``iteration``.
    """
    files = {file.name: file.stat().st_size for file in sorted(directory.iterdir()) if file.is_file()}
    # each writer has taken the checksums of its files: storage is not read a second time
    known = {name: value for name, value in (checksums or {}).items() if name in files}
    known |= checksums_of(directory / name for name in files if name not in known)
    states = sorted((root / "rollout").glob(f"*_{iteration}.*"))
    data_state = {f"rollout/{file.name}": file.stat().st_size for file in states}
    manifest = Manifest(
        iteration=iteration,
        weight_version=str(iteration + 1) if weight_version is None else weight_version,
        layout=dict(layout),
        content=dict(content),
        files=files,
        checksums=dict(sorted(known.items())),
        data_state=data_state,
        has_critic=(iteration_directory(root / CRITIC, iteration) / MANIFEST).is_file(),
    )
    content_of_file = asdict(manifest) | {"rollout_id": manifest.rollout_id}
    _write_whole(directory / MANIFEST, json.dumps(content_of_file, indent=2))
    return manifest


def write_tracker(root: Path, text: str) -> None:
    _write_whole(root / TRACKER, text)


def _write_whole(path: Path, text: str) -> None:
    with replacing(path, sync=True) as partial:
        partial.write_text(text, encoding="utf-8")


def make_empty(directory: Path) -> None:
    """Create ``directory`` empty. Files of an interrupted save are removed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def partial_directory(root: Path, name: str) -> Path:
    """The directory in which ``<root>/<name>`` is written before :func:`publish`."""
    return root / f".{name}.partial"


def publish(
    root: Path,
    name: str,
    iteration: int,
    *,
    layout: Mapping[str, int],
    content: Mapping[str, Any],
    checksums: Mapping[str, str] | None = None,
    keep: int | None = None,
) -> list[int]:
    """Give a directory that is written its manifest and its name, let the tracker name it, delete old checkpoints.

    Args:
        checksums: see :func:`write_manifest`.

    Returns:
        Iterations that were deleted.
    """
    partial, final = partial_directory(root, name), root / name
    is_iteration = iteration_of(final) is not None
    # a release has not trained on any rollout
    version = None if is_iteration else "0"
    write_manifest(
        partial, iteration, root=root, layout=layout, content=content, weight_version=version, checksums=checksums
    )
    replace_directory(final, partial, _aside(final))  # of a resumed run, which saves it again
    # after the rename: the tracker must never name an incomplete directory
    write_tracker(root, str(iteration) if is_iteration else name)
    # Of processes that died. A run writes one checkpoint at a time, and no other one may write here (run.lock).
    for left in (*root.glob(f".iter_*{_REMOVED}"), *root.glob(".iter_*.partial")):
        shutil.rmtree(left, ignore_errors=True)
    return prune(root, keep)


def _aside(directory: Path) -> Path:
    """The name of ``directory`` while it is deleted."""
    # an interrupted deletion must not leave half a checkpoint under a valid name
    return directory.with_name(f".{directory.name}{_REMOVED}")


def read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest of ``directory``. None if it has none.

    Raises:
        ValueError: the file is not a manifest.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return None
    raw: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a manifest of format {_FORMAT}")
    # fields of newer versions are ignored
    names = Manifest.__dataclass_fields__
    return Manifest(**{name: value for name, value in raw.items() if name in names})


def what_is_torn(directory: Path) -> str | None:
    """The reason why ``directory`` is not a complete checkpoint, as the end of a sentence. None if it is complete."""
    if not (directory / "metadata.json").is_file():
        if next(directory.glob("mp_rank_*"), None):
            return "it has Megatron's older format, torch: save it with --ckpt-format torch_dist"
        return "metadata.json is missing"
    try:
        manifest = read_manifest(directory)
    except (ValueError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if manifest is None:
        return None  # written by Megatron: it is taken as it is
    # sizes only: checksums read every byte, see damage
    for name, size in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    critic = iteration_directory(directory.parent / CRITIC, manifest.iteration)
    if manifest.has_critic and (torn := what_is_torn(critic)):
        return f"of the critic's part {CRITIC}/{critic.name} {torn}"
    for name, size in manifest.data_state.items():
        state = directory.parent / name
        if not state.is_file() or state.stat().st_size != size:
            # a warning only: the weights are complete without it
            logger.warning(
                "%s: the Data Buffer's state %s that was saved with it is missing or another.", directory, name
            )
    return None


def complete_iterations(root: Path) -> list[Path]:
    """Complete checkpoints under ``root``, oldest first."""
    directories = sorted(entry for entry in root.glob("iter_*") if iteration_of(entry) is not None)
    return [directory for directory in directories if what_is_torn(directory) is None]


def prune(root: Path, keep: int | None) -> list[int]:
    """Delete all but the newest ``keep`` checkpoints of ours, with their data states. Returns their iterations.

    Directories without a manifest were not written here and stay, as does the one that the tracker names.
    """
    if keep is None:
        return []
    tracked = (root / TRACKER).read_text(encoding="utf-8").strip() if (root / TRACKER).is_file() else ""
    ours = [directory for directory in complete_iterations(root) if (directory / MANIFEST).is_file()]
    removed: list[int] = []
    for directory in ours[: max(0, len(ours) - keep)]:
        manifest = read_manifest(directory)
        assert manifest is not None, f"{directory} was complete a moment ago"
        # a resume would start from it
        if str(manifest.iteration) == tracked:
            continue
        aside = _aside(directory)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(directory.rename(aside))
        for name in manifest.data_state:
            (root / name).unlink(missing_ok=True)
        if manifest.has_critic:
            # of no use without the actor's
            shutil.rmtree(iteration_directory(root / CRITIC, manifest.iteration), ignore_errors=True)
        removed.append(manifest.iteration)
    return removed


# ---- checksums: taken by the rank that wrote a file, shared among the ranks that read. XXH3 with 128 bits, over the
# file on disk. A file is read in blocks, right after it was written or right before it is loaded: its bytes are in the
# page cache then, and no tensor is held twice.

_BLOCK_BYTES = 4 * 1024**2
_MAX_THREADS = 8
# ``__3_0.distcp`` and ``rng_00003.pt`` are files of rank 3
_WRITER = re.compile(r"(?:__|rng_)(\d+)\D.*")


def checksum(path: Path) -> str:
    import xxhash  # not at the top: trainers run on machines without it until they save

    hasher = xxhash.xxh3_128()
    block = memoryview(bytearray(min(_BLOCK_BYTES, path.stat().st_size + 1)))  # most files of a checkpoint are small
    # unbuffered: readinto() fills the block without another copy
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.hexdigest()


def checksums_of(files: Iterable[Path]) -> dict[str, str]:
    """File name -> checksum. Several files at a time."""
    paths = list(files)
    with _threads() as pool:
        return dict(zip((path.name for path in paths), pool.map(checksum, paths), strict=True))


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "checksum")


def written_by(directory: Path, rank: int) -> list[Path]:
    """The files of ``directory`` that ``rank`` wrote, by their names."""
    return [path for path in sorted(directory.iterdir()) if _writer(path.name) == rank]


def find_damage(directory: Path, checksums: Mapping[str, str], rank: int = 0, world_size: int = 1) -> list[str]:
    """Compare this rank's share of ``directory``. Returns one phrase per damaged file.

    A rank gets the files that the rank of the same number wrote. A file without a writer goes by its position.
    """
    # at the same layout a rank loads most tensors from the files that it wrote: storage is read once
    names = [name for index, name in enumerate(sorted(checksums)) if _share(name, index) % world_size == rank]
    with _threads() as pool:
        damage = pool.map(lambda name: _damage(directory / name, checksums[name]), names)
        return [text for text in damage if text is not None]


def _damage(path: Path, expected: str) -> str | None:
    try:
        actual = checksum(path)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if actual == expected else f"{path.name} has the checksum {actual} instead of {expected}"


def _writer(name: str) -> int | None:
    named = _WRITER.fullmatch(name)
    return int(named.group(1)) if named else None


def _share(name: str, index: int) -> int:
    writer = _writer(name)
    return index if writer is None else writer
