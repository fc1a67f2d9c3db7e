"""Trainer ranks that send weights to colocated engines: what each engine could open, and who was told what failed."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.numpy import save_file

from slime.backends import EngineInfo, NamedTensor, Recipients
from slime.utils.errors import EngineError, EngineSilent
from slime.weight_sync import send_disk, send_tensor
from slime.weight_sync import updater as updater_module
from slime.weight_sync.local_checkpoint import pull
from slime.weight_sync.root_hash import RootProof
from slime.weight_sync.send_disk import DeltaUpdater, DiskSettings
from slime.weight_sync.session import ALONE, TrainerRanks, WeightUpdate
from slime.weight_sync.tensor_files import open_bytes, spans_of
from slime.weight_sync.updater import WeightUpdater
from slime.weight_sync.version_store import read_manifest
from tests.unit.weight_sync.fakes import RecordingFleet, RecordingSender, StubTrainer


class Trainer:
    """The same three tensors on every rank, the experts that the rank is asked for, and how often it gathered."""

    def __init__(self, rank: int, num_experts: int) -> None:
        self.num_gathered = 0
        self.rank, self.num_experts = rank, num_experts

    def export_weights(self, bucket_bytes: int, recipients: Recipients) -> Iterator[NamedTensor]:
        for index in range(3):
            self.num_gathered += 1
            yield f"w{index}", torch.arange(8.0) + index
        for expert in recipients.experts(self.rank, self.num_experts):
            yield f"expert{expert}", torch.arange(4.0) + expert


def send_to_colocated(
    rank: int,
    world_size: int,
    engines: list[tuple[int, int]],
    fails: str | None = None,
    num_experts: int = 0,
    expert_blocks: int = 1,
    changed_only: bool = False,
) -> dict[str, Any]:
    """Two updates. ``engines``: (first slot, devices) of each. Returns what this rank saw.

    Args:
        fails: ``memory`` lets rank 1 find no shared memory once, ``engine`` lets the last engine refuse once. ``flush``
            lets an engine not answer when all have sent. ``far`` lets an engine elsewhere refuse the first bucket.
    """
    dist.init_process_group("gloo")
    opened: list[tuple[str, int, dict[str, list[float]]]] = []

    def load(serialized_named_tensors: list[str], weight_version: str) -> None:
        if fails == "engine" and weight_version == "1" and rank == engines[-1][0]:
            raise EngineError("wrong shape")
        for slot, text in enumerate(serialized_named_tensors):
            bucket = pickle.loads(base64.b64decode(text))
            flat = bucket["flattened_tensor"]
            tensors = {
                meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape).tolist()
                for meta in bucket["metadata"]
            }
            opened.append((weight_version, slot, tensors))

    infos = [
        EngineInfo(f"http://{first}", count, first_slot=first, expert_blocks=expert_blocks) for first, count in engines
    ]
    if fails == "far":
        infos.append(EngineInfo("http://far", 1))
    fleet = RecordingFleet(infos, update_weights_from_tensor=load, weight_version=lambda: version)
    updater_module.DistributedSender = lambda fleet, **_: _Network(fleet)  # type: ignore[assignment, misc]
    shareable = send_tensor.shareable

    def scarce(chunk: Any) -> torch.Tensor:
        if fails == "memory" and rank == 1 and version == "1":
            raise EngineError("no shared memory")
        return shareable(chunk)

    send_tensor.shareable = scarce
    ranks = TrainerRanks(rank, world_size, timeout_s=600)
    updater = WeightUpdater(ranks, address="127.0.0.1", shares_devices=True, timeout_s=600, changed_only=changed_only)
    trainer, errors = Trainer(rank, num_experts), []
    for version in ("1", "2"):
        is_failing = fails == "flush" and version == "1"
        fleet.answers["flush_cache"] = EngineSilent("no answer", ["http://2"]) if is_failing else None
        update = WeightUpdate(version, max_chunk_bytes=32, timeout_s=600, proof=_Proof(_Tensors()))
        try:
            updater.update(fleet, trainer, update)
        except EngineError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"opened": opened, "verbs": fleet.verbs, "errors": errors, "gathered": trainer.num_gathered}


class _Tensors:
    """Engines without a tensor that could be compared."""

    def cuts(self, places: Any) -> Any:
        return lambda name, tensor: ()

    def digests(self, hashes: Any) -> list[list[str]]:
        return []


class _Proof(RootProof):
    def verify(self, fleet: Any, version: str, expected: Any, timeout_s: float) -> None:
        pass


class _Network(RecordingSender):
    """Reaches an engine that refuses the first version."""

    def connect(self, address: str, port: int) -> None:
        pass

    def send(self, chunk: Any, weight_version: str) -> None:
        if weight_version == "1":
            raise EngineError("wrong shape")


def send_deltas(rank: int, world_size: int, folder: str, encoding: Any, failing: int | None = None) -> dict[str, Any]:
    """A full version and three others through files. Rank 0 also publishes them alone, in another folder.

    Args:
        failing: a rank that cannot write the changes of the second version.
    """
    dist.init_process_group("gloo")
    ranks = TrainerRanks(rank, world_size, timeout_s=600)
    seen: dict[str, Any] = {"kept": [], "errors": []}
    together = _Publisher(Path(folder, "together"), ranks, encoding)
    alone = _Publisher(Path(folder, "alone"), ALONE, encoding) if rank == 0 else None
    for version in range(4):
        send_disk.save_file = _full_disk if rank == failing and version == 2 else save_file
        try:
            together.publish(version)
        except (EngineError, OSError) as error:
            seen["errors"].append(f"{type(error).__name__}: {error}")
        seen["kept"].append(
            None if together.updater._last is None else sum(a.size for a in together.updater._last.values())
        )
        seen["share"] = together.updater.changed_share
        if alone is not None and failing is None:
            alone.publish(version)
    if rank == 0:
        seen["versions"] = together.versions()
        if alone is not None and failing is None:
            seen["alone"] = alone.versions()
            seen["alone_kept"] = sum(array.size for array in (alone.updater._last or {}).values())
            seen["alone_share"] = alone.updater.changed_share
    return seen


def _full_disk(*_: Any) -> None:
    raise OSError("disk full")


class _Publisher:
    """Weights of a trainer rank, which are the same on all ranks, and their updater. Rank 0 writes full versions."""

    def __init__(self, folder: Path, ranks: TrainerRanks, encoding: Any) -> None:
        self.root, self.trainer = folder / "shared", StubTrainer([3000, 500, 64, 2500, 1000, 36, 900])
        self._local, self._fleet = folder / "local", RecordingFleet(pull_weights=self._pull)
        self._fleet.answers["weight_version"] = lambda: self._fleet.version
        self.updater = DeltaUpdater(ranks, DiskSettings(self.root, self._local, keeps_files=True), encoding=encoding)
        if not ranks.is_source:
            self.trainer.save_hf = lambda path: None  # type: ignore[method-assign]

    def _pull(self, source_dir: str, local_dir: str, version: int) -> None:
        pull(Path(source_dir), Path(local_dir), version)

    def publish(self, version: int) -> None:
        self._fleet.version = str(version)
        for name in list(self.trainer.weights) if version else ():
            self.trainer.step(name, 7 if version < 3 else 0)
        self.updater.update(self._fleet, self.trainer, WeightUpdate(str(version), max_chunk_bytes=None, timeout_s=600))

    def versions(self) -> list[tuple[Any, dict[str, bytes], dict[str, bytes]]]:
        """Of each version: the manifest without its files and lineage, the bytes of the changes, and of the copy."""
        found = []
        for path in sorted(self.root.glob("weight_v*")):
            manifest = asdict(read_manifest(path)) | {"files": None, "lineage": None}
            found.append((manifest, _bytes_in(path), {}))
        return [*found[:-1], (*found[-1][:2], _bytes_in(self._local))]


def _bytes_in(folder: Path) -> dict[str, bytes]:
    with open_bytes(spans_of(folder)) as arrays:
        return {name: array.tobytes() for name, array in arrays.items()}
