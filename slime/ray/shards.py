"""How a rollout's data travels to the trainer: one object-store reference per data-parallel rank, never by value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Box", "RolloutResult"]


@dataclass(frozen=True)
class Box:
    """Keeps Ray from resolving a reference that is passed through the driver."""

    inner: Any


@dataclass(frozen=True)
class RolloutResult:
    """What the rollout manager hands to the driver after one rollout.

    Attributes:
        shards: one box per data-parallel rank; empty with ``--debug-rollout-only``.
        metrics: ``rollout/...`` and ``perf/...`` values.
        version: weight version that the engines held from its first to its last token; None without engines.
        seconds: from the request to the shards.
    """

    shards: list[Box]
    metrics: dict[str, float]
    version: str | None = None
    seconds: float = 0.0
