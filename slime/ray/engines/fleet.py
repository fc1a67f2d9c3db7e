"""The engines as the trainer's weight sync sees them: handles of engine actors behind the EngineFleet protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayTaskError

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.engine import MEMORY_TAGS
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.waiting import get
from slime.utils.errors import DeadlineExceeded, EngineSilent


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


# Lets the engines that share devices with the trainer give their memory back, and take it again.
#
#     offload          pause (what still runs ends with what it has), flush the cache, release everything
#     onload_weights   room for weights; the engines stay paused and unwatched
#     onload_kv        the rest of the memory; requests are served, and the health of the engines is watched again
#
# Lives in the rollout manager. The driver calls it through :class:`RemoteEngineMemory`. The verbs of an engine may be
# repeated, so these may be as well: an engine that died is left out, and one that has started again meanwhile holds its
# memory already.

logger = logging.getLogger(__name__)


class SharedEngines(Protocol):
    """What is needed of the engines' owner."""

    def offloadable(self) -> RayEngineFleet:
        """Living engines that stand on devices of the trainer."""

    @property
    def fleet(self) -> RayEngineFleet | None:
        """Living engines that receive weights, wherever they stand."""

    def lost(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that are dead, looked at just now."""

    def pause_watch(self) -> None: ...

    def resume_watch(self) -> None: ...


class EngineMemory:
    """
    Args:
        timeout_s: of each verb on all engines.
        replaces_dead: engines that die are made good by somebody else; without, their death is an error here.
    """

    def __init__(self, engines: SharedEngines, timeout_s: float, *, replaces_dead: bool) -> None:
        self._engines = engines
        self._timeout_s = timeout_s
        self._replaces_dead = replaces_dead

    def offload(self) -> None:
        """Release everything."""
        self._engines.pause_watch()
        self._on(self._engines.offloadable, "pause_generation", mode="abort")
        self._on(self._engines.offloadable, "flush_cache")
        self._on(self._engines.offloadable, "release_memory_occupation", tags=MEMORY_TAGS)

    def onload_weights(self) -> None:
        """Room for weights. There is nothing in it unless the engine keeps a copy of its weights."""
        self._on(self._engines.offloadable, "resume_memory_occupation", tags=("weights",))

    def onload_kv(self) -> None:
        """All memory again. Engines elsewhere were paused with the others, for the sync: they go on as well."""
        self._on(self._engines.offloadable, "resume_memory_occupation", tags=MEMORY_TAGS)
        self._on(self._engines.offloadable, "continue_generation")
        self._on(lambda: self._engines.fleet, "continue_generation")
        self._engines.resume_watch()

    def _on(self, living: Callable[[], RayEngineFleet | None], verb: str, **kwargs: Any) -> None:
        """``verb`` on all engines of ``living``; when one dies of it, again on the others."""
        while (fleet := living()) is not None and fleet.engines:
            try:
                fleet.start(verb, **kwargs).wait(self._timeout_s)
                return
            except Exception as error:
                lost = self._engines.lost(fleet.names) if self._replaces_dead else []
                if not lost:
                    raise
                dead = ", ".join(name.partition(".")[0] for name in lost)
                logger.warning("engine %s died during %s: %s", dead, verb, message_of(error) or error)


@dataclass(frozen=True)
class RemoteEngineMemory:
    """The verbs of the manager's :class:`EngineMemory`, called by the driver; each returns when it is done."""

    manager: Any
    timeout_s: float

    def offload(self) -> None:
        self._call("offload", "engines to release their memory")

    def onload_weights(self) -> None:
        self._call("onload_weights", "engines to make room for weights")

    def onload_kv(self) -> None:
        self._call("onload_kv", "engines to take their memory back")

    def _call(self, method: str, what: str) -> None:
        get(getattr(self.manager, method).remote(), self.timeout_s, what, "--weight-sync-timeout")
