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
        version: weight version that the engines held at its end; None without engines.
        oldest_version: the one they held at its start; another one only where all engines died in between.
        seconds: from the request to the shards.
        num_tokens: prompt and response tokens of the samples that are trained on.
        forward_flops: floating-point operations of one forward pass over them.
    """

    shards: list[Box]
    metrics: dict[str, float]
    version: str | None = None
    oldest_version: str | None = None
    seconds: float = 0.0
    num_tokens: int = 0
    forward_flops: float = 0.0

    @property
    def versions(self) -> tuple[str, str] | None:
        """(oldest, newest) weight version that its tokens may come from."""
        return None if self.version is None else (self.oldest_version or self.version, self.version)
