"""The engines as the trainer's weight sync sees them: handles of engine actors behind the EngineFleet protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.backends.protocols import EngineInfo
from slime.ray.waiting import get

__all__ = ["RayCalls", "RayEngineFleet"]


@dataclass(frozen=True)
class RayCalls:
    """Calls of one verb that run on every engine."""

    refs: Sequence[Any]
    verb: str
    urls: Sequence[str]

    def wait(self, timeout_s: float) -> list[Any]:
        what = f"engines {', '.join(self.urls)} to finish {self.verb}"
        return get(list(self.refs), timeout_s, what, "Look at the engines' logs in the run's engine folder")


@dataclass(frozen=True)
class RayEngineFleet:
    """Picklable: the manager makes it, the trainer ranks use it.

    Attributes:
        names: of the engines, for the manager; a url may come back, a name does not.
    """

    handles: Sequence[Any]
    engines: Sequence[EngineInfo]
    names: Sequence[str] = ()

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> RayCalls:
        extra = each if each is not None else [{}] * len(self.handles)
        refs = [getattr(handle, verb).remote(**kwargs, **own) for handle, own in zip(self.handles, extra, strict=True)]
        return RayCalls(refs, verb, [engine.url for engine in self.engines])
