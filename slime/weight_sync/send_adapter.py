"""Sends a LoRA adapter instead of weights. The base model travels once per engine.

    first sync of an engine    base, through the updater of --update-weight-transport; engines stay paused
    every sync                 stage | pause | replace the adapter and set the version, flush | verify | continue

    --update-weight-transport   the adapter travels
    nccl                        as bytes to the host of each engine, also with --colocate: it stays in host memory
    disk                        as a directory in peft's format

Bytes are *staged* while the engines still generate: each host gets them once. Every rank of every engine compares the
SHA-256 of each tensor (``expected_checksums`` of SGLang). That an engine computes with the adapter is proved when it
serves again: :mod:`slime.weight_sync.probe`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from slime.backends import SOURCE, EngineFleet, NamedTensor, PendingCalls, WeightExporter
from slime.data.engine_fields import ADAPTER_NAME
from slime.models.lora import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, LoraConfig
from slime.utils.errors import EngineError, undone
from slime.utils.memory_utils import bytes_of
from slime.weight_sync.chunks import WeightChunk, chunk_of
from slime.weight_sync.root_hash import Checksums
from slime.weight_sync.send_disk import DiskSettings, DiskUpdater
from slime.weight_sync.session import (
    OtherWeights,
    TrainerRanks,
    WeightUpdate,
    after_failure,
    message_of,
    paused,
    verify_version,
)
from slime.weight_sync.updater import Updater
from slime.weight_sync.version_store import version_path

BaseWriter = Callable[[WeightExporter, str], None]
"""Writes the base model of an exporter as a Hugging Face checkpoint to a directory."""


class AdapterUpdater:
    """Sends the base model to engines that lack it, and the adapter to all. Every rank has one.

    Args:
        base: the updater for weights.
        write_base: for transports by files.
        files: settings of a transport by files, with a directory for adapters only. None: adapters are sent as bytes.
    """

    changed_share: float | None = None

    def __init__(
        self,
        ranks: TrainerRanks,
        config: LoraConfig,
        base: Updater,
        write_base: BaseWriter,
        files: DiskSettings | None = None,
    ) -> None:
        self._ranks = ranks
        self._config = config
        self._base = base
        self._write_base = write_base
        self._files = None if files is None else _AdapterFiles(ranks, files)
        self._version: str | None = None
        # Engines whose base may be incomplete, although they report the version of the update that sent it.
        self._incomplete: set[str] = set()

    def update(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        """Make the trainer's adapter that of every engine. Returns the bytes sent per engine, on the source.

        Raises: as :func:`slime.weight_sync.session.push_weights`.
        """
        without_base = self._without_base(fleet, update)
        send = self._prepared(fleet, trainer, replace(update, proof=None, restores=False))
        if not without_base:
            num_bytes = send()
        else:
            newcomers = fleet.only(without_base)
            urls = {engine.url for engine in newcomers.engines}
            self._incomplete |= urls

            def go_on() -> None:
                if self._ranks.is_source and not update.comes_again:
                    after_failure(newcomers, "continue_generation", update.timeout_s)

            with undone(go_on):
                # they continue when they have the adapter, without which they answer no request
                base = _Exported(trainer, lambda path: self._write_base(trainer, path))
                num_bytes = self._base.update(newcomers, base, replace(update, continues=False))
                self._incomplete -= urls
                self._base.disconnect()  # it is not needed again, and its connections hold device memory
                num_bytes += send()
        self._version = update.version
        return num_bytes

    def _without_base(self, fleet: EngineFleet, update: WeightUpdate) -> list[int]:
        """The engines that do not have this run's base: all at the first update, later those that have restarted."""
        if self._version is None:
            return list(range(len(fleet.engines)))
        # A server that has restarted reports SGLang's default. The new version is that of an attempt that failed at
        # another engine.
        known = (self._version, update.version)

        def find() -> list[int]:
            versions = fleet.start("weight_version").wait(update.timeout_s)
            return [
                index
                for index, (engine, version) in enumerate(zip(fleet.engines, versions, strict=True))
                if version not in known or engine.url in self._incomplete
            ]

        return self._ranks.on_source(find)

    def _prepared(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> Callable[[], int]:
        """The function that replaces the adapter of all engines. They may generate until it is called."""
        if (files := self._files) is not None:
            adapter = _Exported(trainer, lambda path: write_adapter(trainer, self._config, self._ranks, path))
            return lambda: files.update(fleet, adapter, update)
        chunk = chunk_of(trainer.export_adapter(recipients=SOURCE))  # a collective
        staging: list[PendingCalls] = []
        self._ranks.on_source(lambda: staging.append(_stage(fleet, chunk, update.timeout_s)))

        def send() -> int:
            self._ranks.on_source(lambda: self._push(fleet, update, chunk, staging[0]))
            return chunk.num_bytes

        return send

    def _push(self, fleet: EngineFleet, update: WeightUpdate, chunk: WeightChunk, staging: PendingCalls) -> None:
        checksums = {name: hashlib.sha256(bytes_of(tensor).data).hexdigest() for name, tensor in chunk.tensors}
        config = served_config(chunk.tensors, self._config)
        staging.wait(update.timeout_s)
        push_adapter(fleet, update, "load_staged_adapter", config=config, checksums=checksums)

    def disconnect(self) -> None:
        self._base.disconnect()


def push_adapter(fleet: EngineFleet, update: WeightUpdate, verb: str, **content: Any) -> None:
    """Make every engine replace its adapter by ``verb(name, version, **content)``. On the source only."""
    with paused(fleet, update):
        # before the new adapter is there: a paused engine computes no other prefix until it continues
        flushing = fleet.start("flush_cache", timeout_s=update.timeout_s)
        fleet.start(verb, name=ADAPTER_NAME, version=update.version, **content).wait(update.timeout_s)
        flushing.wait(update.timeout_s)
        verify_version(fleet, fleet.start("weight_version"), update)


def _stage(fleet: EngineFleet, chunk: WeightChunk, timeout_s: float) -> PendingCalls:
    return fleet.start(
        "stage_adapter",
        [{"num_ranks": engine.num_gpus} for engine in fleet.engines],
        tensors=chunk.flatten().cpu().numpy().tobytes(),
        metadata=chunk.metadata(),
        timeout_s=timeout_s,
    )


def served_config(tensors: Sequence[NamedTensor], config: LoraConfig) -> dict[str, Any]:
    """The content of adapter_config.json for SGLang."""
    names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, _ in tensors}
    return {
        "peft_type": "LORA",
        "r": config.rank,
        # SGLang 0.5.23 ignores use_rslora and multiplies by lora_alpha / r
        "lora_alpha": config.scale * config.rank,
        "use_rslora": False,
        "target_modules": sorted(names),
        "bias": "none",
    }


class _AdapterFiles(DiskUpdater):
    """Versions that are adapters in peft's format."""

    def _load(self, fleet: EngineFleet, version: int, update: WeightUpdate, checksums: Checksums | None) -> None:
        path = version_path(self._settings.root, version)
        try:
            push_adapter(fleet, update, "load_adapter_files", path=str(path))
        except EngineError as error:
            text = f"{message_of(error)} (The adapter is at {path}, --update-weight-disk-dir: every engine needs it.)"
            raise EngineError(text) from error


@dataclass(frozen=True)
class _Exported(OtherWeights):
    """A trainer that writes other files than those of ``--save-hf``.

    Attributes:
        write: writes them to a directory. A collective.
    """

    write: Callable[[str], None]

    def save_hf(self, path: str) -> None:
        self.write(path)


def write_adapter(trainer: WeightExporter, config: LoraConfig, ranks: TrainerRanks, path: str) -> None:
    """Write the adapter in peft's format, as SGLang reads it. A collective."""
    tensors = list(trainer.export_adapter(recipients=SOURCE))

    def write() -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(served_config(tensors, config)), encoding="utf-8")
        on_host = {FILE_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        save_file(on_host, folder / WEIGHTS_FILE)

    ranks.on_source(write)
