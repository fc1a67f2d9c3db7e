"""Engines that record their calls, and a trainer of one rank, for tests of weight sync without real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slime.backends import EVERY_RANK, EngineInfo, NamedTensor, Recipients
from slime.weight_sync.chunks import WeightChunk


class Done:
    def __init__(self, results: Sequence[Any]) -> None:
        self.results = list(results)

    def wait(self, timeout_s: float = 0.0) -> list[Any]:
        for result in self.results:
            if isinstance(result, Exception):
                raise result
        return self.results


class RecordingFleet:
    """Engines that record every verb. An answer is a value, an exception, or a function of the call's arguments."""

    def __init__(self, engines: Sequence[EngineInfo] | None = None, **answers: Any) -> None:
        self.engines = engines or [EngineInfo("http://a", 1), EngineInfo("http://b", 1)]
        self.verbs: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.version = "7"
        self.answers: dict[str, Any] = {"rank_checksums": [(0, {"w": "sum"})]} | answers

    def only(self, indices: Sequence[int]) -> RecordingFleet:
        part = RecordingFleet([self.engines[index] for index in indices])
        part.verbs, part.calls, part.answers = self.verbs, self.calls, self.answers
        return part

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> Done:
        self.verbs.append(verb)
        self.calls.append((verb, kwargs))
        if "weight_version" in kwargs:
            self.version = kwargs["weight_version"]
        answer = self.answers.get(verb, self.version if verb == "weight_version" else None)
        try:
            value = answer(**kwargs) if isinstance(answer, Callable) else answer  # type: ignore[arg-type]
        except Exception as error:
            value = error
        return Done([value] * len(self.engines))


class RecordingSender:
    def __init__(self, fleet: RecordingFleet, error: Exception | None = None, *, fails_in: str = "send") -> None:
        self.fleet, self.error, self.fails_in = fleet, error, fails_in
        self.sent: list[tuple[WeightChunk, str]] = []

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        self.fleet.verbs.append("send")
        self.sent.append((chunk, weight_version))
        if self.error and self.fails_in == "send":
            raise self.error

    def finish(self) -> None:
        self.fleet.verbs.append("finish")
        if self.error and self.fails_in == "finish":
            raise self.error

    def disconnect(self) -> None:
        self.fleet.verbs.append("disconnect")


class StubTrainer:
    """Weights that :meth:`step` changes, and that can be written."""

    def __init__(self, sizes: Iterable[int] = (3000, 500, 64)) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.weights = {
            f"layers.{index}.weight": torch.randn(size, generator=self.generator) for index, size in enumerate(sizes)
        }
        self.num_saved = 0
        self.save_error: Exception | None = None

    def step(self, name: str = "layers.0.weight", count: int = 5) -> None:
        where = torch.randperm(self.weights[name].numel(), generator=self.generator)[:count]
        self.weights[name][where] += 1.0

    def export_weights(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        yield from self.weights.items()

    def save_hf(self, path: str) -> None:
        if self.save_error is not None:
            raise self.save_error
        self.num_saved += 1
        folder = Path(path)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file(self.weights, folder / "model.safetensors")
