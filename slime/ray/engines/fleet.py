"""The engines as the trainer's weight sync sees them: handles of engine actors behind the EngineFleet protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from slime.backends.protocols import EngineInfo
from slime.ray.watch.waiting import get
from slime.utils.errors import DeadlineExceeded, EngineSilent

__all__ = ["RayCalls", "RayEngineFleet", "WaitingEngines", "silent_engines"]


@dataclass(frozen=True)
class RayCalls:
    """Calls of one verb that run on every engine."""

    refs: Sequence[Any]
    verb: str
    urls: Sequence[str]

    def wait(self, timeout_s: float) -> list[Any]:
        what = f"engines {', '.join(self.urls)} to finish {self.verb}"
        try:
            return get(list(self.refs), timeout_s, what, "Look at the engines' logs in the run's engine folder")
        except DeadlineExceeded as error:
            if type(error) is not DeadlineExceeded:
                raise  # an engine's own
            _, pending = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)
            silent = [url for url, ref in zip(self.urls, self.refs, strict=True) if ref in pending]
            raise EngineSilent(f"{error} No answer from: {', '.join(silent)}.", silent) from error


@dataclass(frozen=True)
class RayEngineFleet:
    """Picklable: the manager makes it, the trainer ranks use it.

    Attributes:
        names: of the engines, for the manager; a url may come back, a name does not.
    """

    handles: Sequence[Any]
    engines: Sequence[EngineInfo]
    names: Sequence[str] = ()

    def only(self, indices: Sequence[int]) -> RayEngineFleet:
        """A fleet of these engines of it."""
        names = [self.names[index] for index in indices] if self.names else ()
        return RayEngineFleet([self.handles[i] for i in indices], [self.engines[i] for i in indices], names)

    @staticmethod
    def joined(fleets: Iterable[RayEngineFleet]) -> RayEngineFleet:
        """The engines of all ``fleets``, in their order."""
        parts = list(fleets)
        return RayEngineFleet(
            tuple(handle for fleet in parts for handle in fleet.handles),
            tuple(engine for fleet in parts for engine in fleet.engines),
            tuple(name for fleet in parts for name in fleet.names),
        )

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> RayCalls:
        extra = each if each is not None else [{}] * len(self.handles)
        refs = [getattr(handle, verb).remote(**kwargs, **own) for handle, own in zip(self.handles, extra, strict=True)]
        return RayCalls(refs, verb, [engine.url for engine in self.engines])


@dataclass(frozen=True)
class WaitingEngines:
    """What the driver is told when it asks who needs weights.

    Attributes:
        fleet: engines that have started again and wait for weights; may be empty.
        num_serving: engines that the router sends requests to.
    """

    fleet: RayEngineFleet
    num_serving: int


def silent_engines(error: BaseException, fleet: RayEngineFleet) -> list[str]:
    """Names of the engines of ``fleet`` whose silence ``error`` tells of, from whichever process it comes."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    urls = error.urls if isinstance(error, EngineSilent) else ()
    return [name for name, engine in zip(fleet.names, fleet.engines, strict=True) if engine.url in urls]
