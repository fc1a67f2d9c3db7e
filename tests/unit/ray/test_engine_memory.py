"""Engines on the trainer's devices release and resume memory. An engine that dies meanwhile is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from slime.backends import EngineInfo
from slime.backends.sglang_utils.engine import MEMORY_TAGS, EngineSpec, SGLangEngine
from slime.ray.engines.fleet import EngineMemory
from slime.utils.errors import EngineError


@dataclass
class Calls:
    error: Exception | None

    def wait(self, timeout_s: float) -> list[Any]:
        if self.error is not None:
            raise self.error
        return []


@dataclass
class FakeFleet:
    names: list[str]
    owner: FakeEngines

    @property
    def engines(self) -> list[EngineInfo]:
        return [EngineInfo(name, 1) for name in self.names]

    def start(self, verb: str, **kwargs: Any) -> Calls:
        self.owner.told.append((verb, list(self.names), kwargs.get("tags")))
        dead = [name for name in self.names if self.owner.dies.get(name) == verb]
        return Calls(EngineError(f"engine {dead[0]} is gone") if dead else None)


@dataclass
class FakeEngines(EngineMemory):
    """Engines ``0.0`` and ``1.0`` on the trainer's devices, ``2.0`` elsewhere."""

    dies: dict[str, str] = field(default_factory=dict)
    replaces_dead: bool = False
    memory_timeout_s: float = 1.0
    told: list[tuple[str, list[str], Any]] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def offloadable(self) -> Any:
        return FakeFleet([name for name in ("0.0", "1.0") if name not in self.dead], self)

    @property
    def fleet(self) -> Any:
        return FakeFleet([name for name in ("0.0", "1.0", "2.0") if name not in self.dead], self)

    def lost(self, names: Any) -> list[str]:
        self.dead = [name for name in names if name in self.dies]
        return self.dead

    def pause_watch(self) -> None:
        self.told.append(("pause_watch", [], None))

    def resume_watch(self) -> None:
        self.told.append(("resume_watch", [], None))


SHARED = ["0.0", "1.0"]


def test_memory_is_released_by_paused_engines_and_resumed_before_they_serve():
    engines = FakeEngines()
    engines.offload()
    engines.onload_weights()
    engines.onload_kv()
    assert engines.told == [
        ("pause_watch", [], None),
        ("pause_generation", SHARED, None),
        ("flush_cache", SHARED, None),
        ("release_memory_occupation", SHARED, MEMORY_TAGS),
        ("resume_memory_occupation", SHARED, ("weights",)),
        ("resume_memory_occupation", SHARED, MEMORY_TAGS),
        ("continue_generation", SHARED, None),
        ("continue_generation", [*SHARED, "2.0"], None),
        ("resume_watch", [], None),
    ]


def test_a_death_is_an_error_where_nobody_replaces_engines():
    with pytest.raises(EngineError, match=r"1\.0 is gone"):
        FakeEngines({"1.0": "flush_cache"}).offload()


def test_an_engine_that_dies_of_it_is_left_out_where_it_is_replaced():
    engines = FakeEngines({"1.0": "release_memory_occupation"}, replaces_dead=True)
    engines.offload()
    assert [(verb, names) for verb, names, _ in engines.told[-2:]] == [
        ("release_memory_occupation", SHARED),
        ("release_memory_occupation", ["0.0"]),
    ]


def test_a_refusal_of_a_living_engine_is_an_error_in_any_case():
    engines = FakeEngines({"1.0": "flush_cache"}, replaces_dead=True)
    engines.lost = lambda names: []  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        engines.offload()


def test_an_engine_is_never_asked_for_memory_that_it_holds_or_has_given(monkeypatch, tmp_path):
    """SGLang dies of a kind of memory that is resumed and was not released."""
    asked: list[tuple[str, list[str]]] = []
    engine = SGLangEngine(EngineSpec(0, "127.0.0.1", 1, [], {}, tmp_path / "log"))
    monkeypatch.setattr(engine, "_change", lambda verb, body: asked.append((verb, body["tags"])))
    engine.resume_memory_occupation()
    engine.release_memory_occupation(["kv_cache"])
    engine.release_memory_occupation()
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    engine.resume_memory_occupation()
    engine.resume_memory_occupation()
    assert asked == [
        ("release_memory_occupation", ["kv_cache"]),
        ("release_memory_occupation", ["weights", "cuda_graph"]),
        ("resume_memory_occupation", ["weights"]),
        ("resume_memory_occupation", ["kv_cache", "cuda_graph"]),
    ]
