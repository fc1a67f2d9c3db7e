"""Sends a LoRA adapter instead of weights. The base model travels once per engine.

    first sync of an engine    base, through the updater of --update-weight-transport; engines stay paused
    every sync                 pause | replace the adapter | set the version | flush | verify the version | continue

    --update-weight-transport   the adapter travels
    nccl                        as bytes in one request per engine, also with --colocate: engines keep it in host memory
    disk                        as a directory in peft's format

With bytes, every rank of every engine compares the SHA-256 of each tensor (``expected_checksums`` of SGLang). That an
engine computes with the adapter is proved when it serves again: :mod:`slime.weight_sync.probe`.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from slime.backends.protocols import EVERY_RANK, SOURCE, EngineFleet, NamedTensor, Recipients, WeightExporter
from slime.data.served_adapter import ADAPTER_NAME
from slime.models.lora import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, LoraConfig
from slime.utils.errors import EngineError
from slime.weight_sync.chunks import bytes_of, chunk_of
from slime.weight_sync.send_disk import DiskSettings, DiskUpdater
from slime.weight_sync.session import (
    TrainerRanks,
    WeightUpdate,
    after_failure,
    error_of,
    flush_and_verify,
    message_of,
    paused,
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

    def update(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        """Make the trainer's adapter that of every engine. Returns the bytes sent per engine, on the source.

        Raises: as :func:`slime.weight_sync.session.push_weights`.
        """
        without_base = self._without_base(fleet, update.timeout_s)
        if not without_base:
            num_bytes = self._update_adapter(fleet, trainer, update)
        else:
            newcomers = fleet.only(without_base)
            try:
                # they continue when they have the adapter, without which they answer no request
                base = _Exported(trainer, lambda path: self._write_base(trainer, path))
                num_bytes = self._base.update(newcomers, base, replace(update, continues=False))
                self._base.disconnect()  # it is not needed again, and its connections hold device memory
                num_bytes += self._update_adapter(fleet, trainer, update)
            except BaseException:
                if self._ranks.is_source and not update.comes_again:
                    after_failure(newcomers, "continue_generation", update.timeout_s)
                raise
        self._version = update.version
        return num_bytes

    def _update_adapter(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        # the checks of weights do not see adapters
        plain = replace(update, checksums=None, restores=False)
        if self._files is not None:
            adapter = _Exported(trainer, lambda path: write_adapter(trainer, self._config, self._ranks, path))
            return self._files.update(fleet, adapter, plain)
        return self._send(fleet, trainer, plain)

    def _without_base(self, fleet: EngineFleet, timeout_s: float) -> list[int]:
        """The engines that do not have this run's base: all at the first update, later those that have restarted."""
        if self._version is None:
            return list(range(len(fleet.engines)))
        found: list[int] | Exception = []
        if self._ranks.is_source:
            try:
                versions = fleet.start("weight_version").wait(timeout_s)
                # a server that has restarted reports SGLang's default
                found = [index for index, version in enumerate(versions) if version != self._version]
            except Exception as error:  # the other ranks wait in from_source()
                found = error
        answer = self._ranks.from_source(message_of(found) if isinstance(found, Exception) else found)
        if isinstance(found, Exception):
            raise found
        if isinstance(answer, str):
            raise EngineError(answer)
        indices: list[int] = answer
        return indices

    def _send(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        tensors = list(trainer.export_adapter(recipients=SOURCE))  # a collective
        failure: Exception | None = None
        payload = b""
        if self._ranks.is_source:
            payload = payload_of(tensors)
            failure = error_of(lambda: self._push(fleet, update, tensors, payload))
        _raise_together(self._ranks, failure)
        return len(payload)

    def _push(self, fleet: EngineFleet, update: WeightUpdate, tensors: list[NamedTensor], payload: bytes) -> None:
        push_adapter(
            *(fleet, update, "load_adapter_tensors", [{"num_ranks": engine.num_gpus} for engine in fleet.engines]),
            tensors=payload,
            config=served_config(tensors, self._config),
            checksums={name: hashlib.sha256(bytes_of(tensor).data).hexdigest() for name, tensor in tensors},
        )

    def disconnect(self) -> None:
        self._base.disconnect()


def push_adapter(
    fleet: EngineFleet, update: WeightUpdate, verb: str, each: list[dict[str, Any]] | None = None, **content: Any
) -> None:
    """Make every engine replace its adapter by ``verb(name, **content)``. On the source only."""
    with paused(fleet, update):
        fleet.start(verb, each, name=ADAPTER_NAME, **content).wait(update.timeout_s)
        fleet.start("set_weight_version", version=update.version).wait(update.timeout_s)
        flush_and_verify(fleet, update)


def payload_of(tensors: list[NamedTensor]) -> bytes:
    """The tensors as SGLang's ``flattened_bucket``: a pickle that holds only what its unpickler allows."""
    chunk = chunk_of(tensors)
    return pickle.dumps({"metadata": chunk.metadata(), "flattened_tensor": chunk.flatten().cpu()})


def served_config(tensors: list[NamedTensor], config: LoraConfig) -> dict[str, Any]:
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

    def _load(self, fleet: EngineFleet, version: int, update: WeightUpdate, sent: list[NamedTensor]) -> None:
        path = version_path(self._settings.root, version)
        try:
            push_adapter(fleet, update, "load_adapter_files", path=str(path))
        except EngineError as error:
            text = f"{message_of(error)} (The adapter is at {path}, --update-weight-disk-dir: every engine needs it.)"
            raise EngineError(text) from error


@dataclass(frozen=True)
class _Exported:
    """A trainer that writes other files than those of ``--save-hf``.

    Attributes:
        write: writes them to a directory. A collective.
    """

    trainer: WeightExporter
    write: Callable[[str], None]

    @property
    def is_weight_source(self) -> bool:
        return self.trainer.is_weight_source

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        return self.trainer.export_weights(bucket_bytes, recipients)

    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        return self.trainer.export_adapter(bucket_bytes, recipients)

    def save_hf(self, path: str) -> None:
        self.write(path)


def write_adapter(trainer: WeightExporter, config: LoraConfig, ranks: TrainerRanks, path: str) -> None:
    """Write the adapter in peft's format, as SGLang reads it. A collective."""
    tensors = list(trainer.export_adapter(recipients=SOURCE))
    failure: Exception | None = None
    if ranks.is_source:

        def write() -> None:
            folder = Path(path)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG_FILE).write_text(json.dumps(served_config(tensors, config)), encoding="utf-8")
            on_host = {FILE_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
            save_file(on_host, folder / WEIGHTS_FILE)

        failure = error_of(write)
    _raise_together(ranks, failure)


def _raise_together(ranks: TrainerRanks, failure: Exception | None) -> None:
    """Raise the failure of any rank on all ranks."""
    problems = ranks.agree(None if failure is None else message_of(failure))
    if failure is not None:
        raise failure
    if problems:
        raise EngineError(problems[0])
