"""Updates the local copy of the weights on an engine host: full versions replace it, deltas change it in place.

    <local>/config.json, *.safetensors, ...   what engines of this host load
    <local>/.weight_sync/state.json           its version, and whether a change is in progress
    <local>/.weight_sync/lock                 engines of one host share the copy: one of them changes it at a time

After an interrupted change, for the copy of another run, for a missing or damaged delta, and for a wrong checksum, the
copy is made again: the full version, and then every delta on it. Called in a process of each engine's host.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.utils.async_utils import Deadline, wait_until
from slime.utils.errors import ConfigError, EngineError
from slime.utils.files import replacing
from slime.weight_sync.delta_codec import apply_delta
from slime.weight_sync.tensor_files import checksum_function, checksums_of, open_bytes, populate, spans_of, threads
from slime.weight_sync.version_store import MANIFEST, Manifest, read_manifest, version_path

logger = logging.getLogger(__name__)

_FOLDER = ".weight_sync"
_NAMED = 20  # tensors that an error lists
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _State:
    """The state of the copy.

    Attributes:
        is_whole: False from before the first byte is changed until after the last.
        boot: id of the boot: changes from before a power failure may be lost, so another boot makes the copy invalid.
    """

    lineage: str
    version: int
    is_whole: bool
    boot: str


def pull(root: Path, local: Path, version: int, *, timeout_s: float = 600.0) -> None:
    """Update the copy in ``local`` to ``version`` from ``root``.

    Raises:
        ConfigError: ``local`` holds files that slime did not write.
        EngineError: the version or one that it builds on is missing or damaged, or its checksums are wrong even on a
            fresh copy. The copy must not be loaded then. The next call makes a fresh one.
        DeadlineExceeded: another engine of this host held the lock.
    """
    folder = local / _FOLDER
    strangers = sorted(path.name for path in local.iterdir()) if local.is_dir() else []
    if strangers and not folder.is_dir():  # in this order: another engine of this host may create the folder meanwhile
        raise ConfigError(
            f"--update-weight-local-checkpoint-dir {local} holds {strangers[0]!r} and was not made by slime, which "
            "replaces everything there: name an empty or a new directory."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", timeout_s):
        chain = _chain(root, version)
        state = _read_state(folder)
        done = _position(chain, state)
        if done is not None:
            try:
                _apply(root, local, chain[done + 1 :])
                return
            except EngineError as error:
                # a damaged delta or a wrong checksum may have changed the copy: only a fresh one helps
                logger.warning("weight version %d is applied to a fresh copy: %s", version, error)
        _copy(root, local, chain[0])
        _apply(root, local, chain[1:])


def _chain(root: Path, version: int) -> list[Manifest]:
    """The newest full version up to ``version``, and the deltas from there, in order."""
    chain = [read_manifest(version_path(root, version))]
    while (base := chain[0].base) is not None:
        before = read_manifest(version_path(root, base))
        if before.lineage != chain[0].lineage:
            raise EngineError(f"weight version {chain[0].version} in {root} does not build on version {base} there.")
        chain.insert(0, before)
    return chain


def _position(chain: Sequence[Manifest], state: _State | None) -> int | None:
    """Index of the copy's version in ``chain``. None if a fresh copy is needed."""
    if state is None or not state.is_whole or state.boot != _boot() or state.lineage != chain[0].lineage:
        return None
    return next((index for index, manifest in enumerate(chain) if manifest.version == state.version), None)


def _copy(root: Path, local: Path, full: Manifest) -> None:
    """Replace the copy by the full version, and verify every checksum."""
    source = version_path(root, full.version)
    # before the first byte changes: an interrupted copy must never count as whole
    _write_state(local / _FOLDER, full, is_whole=False)
    for path in local.iterdir():
        # engines would load weight files of the earlier version as well
        if path.is_file() and path.name not in full.files:
            path.unlink()
    for name in full.files:
        shutil.copyfile(source / name, local / name)
    actual = checksums_of(local, checksum_function(full.checksum))
    _compare(full, actual, source)
    _write_state(local / _FOLDER, full, is_whole=True)


def _apply(root: Path, local: Path, deltas: Sequence[Manifest]) -> None:
    """Apply each delta in turn, and verify the checksums of the changed tensors."""
    spans = spans_of(local) if deltas else {}
    for delta in deltas:
        source = version_path(root, delta.version)
        checksum = checksum_function(delta.checksum)
        unknown = [name for name in delta.tensors if name not in spans]
        if unknown:
            raise EngineError(f"{source} changes tensors that the copy in {local} lacks: {', '.join(unknown[:_NAMED])}")
        packed_spans = spans_of(source)
        # an interrupted delta leaves a mixture of two versions
        _write_state(local / _FOLDER, delta, is_whole=False)
        with (
            open_bytes({name: packed_spans[name] for name in delta.tensors}) as packed,
            open_bytes({name: spans[name] for name in delta.tensors}, writable=True) as targets,
            threads() as pool,
        ):

            def change(name: str) -> str:
                # one thread per tensor: numpy, zstd and the checksum release the GIL
                populate(targets[name])
                apply_delta(targets[name], packed[name].data, delta.encoding)  # noqa: B023 (used within the loop only)
                return checksum(targets[name])  # noqa: B023

            actual = dict(zip(delta.tensors, pool.map(change, delta.tensors), strict=True))
        _compare(delta, actual, source)
        _write_state(local / _FOLDER, delta, is_whole=True)


def _compare(manifest: Manifest, actual: dict[str, str], source: Path) -> None:
    wrong = [name for name, checksum in manifest.tensors.items() if actual.get(name) != checksum]
    if wrong:
        raise EngineError(
            f"{len(wrong)} of {len(manifest.tensors)} tensors do not have the checksums that {source / MANIFEST} "
            f"names: {', '.join(wrong[:_NAMED])}"
        )


def _read_state(folder: Path) -> _State | None:
    try:
        return _State(**json.loads((folder / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # missing or damaged: a fresh copy is made


def _write_state(folder: Path, manifest: Manifest, *, is_whole: bool) -> None:
    state = _State(manifest.lineage, manifest.version, is_whole, _boot())
    with replacing(folder / "state.json") as partial:  # a reader finds the old or the new state
        partial.write_text(json.dumps(asdict(state)), encoding="utf-8")


def _boot() -> str:
    # without /proc a reboot is not noticed
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    # the kernel releases the lock when the file is closed, also if the process dies
    with path.open("w") as lock:
        wait_until(lambda: _try_lock(lock.fileno()), Deadline(timeout_s, f"the lock {path} of another engine"))
        yield


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
