"""Calls to several engines at once, with the memory verbs of engines that share devices with the trainer.

offload          pause (running requests end with the tokens they have), flush the cache, release all memory
onload_weights   take memory for weights (the engines stay paused and unwatched)
onload_kv        take all memory, serve, resume the health checks
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from slime.backends import EngineInfo
from slime.backends.sglang_utils.engine import MEMORY_TAGS
from slime.ray.watch import get
from slime.ray.watch.failure_report import message_of
from slime.utils.errors import DeadlineExceeded, EngineSilent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayCalls:
    """Calls of one verb that run on every engine."""

    refs: Sequence[Any]
    verb: str
    urls: Sequence[str]

    def wait(self, timeout_s: float) -> list[Any]:
        """The results. Raises EngineSilent with the urls of the engines that did not answer in time."""
        what = f"engines {', '.join(self.urls)} to finish {self.verb}"
        try:
            results: list[Any] = get(
                list(self.refs), timeout_s, what, "Look at the engines' logs in the run's engine folder"
            )
            return results
        except DeadlineExceeded as error:
            if type(error) is not DeadlineExceeded:
                raise  # Ray raises an engine's error as a subclass. Only the deadline of this wait means silence.
            _, pending = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)
            silent = [url for url, ref in zip(self.urls, self.refs, strict=True) if ref in pending]
            raise EngineSilent(f"{error} No answer from: {', '.join(silent)}.", silent) from error


@dataclass(frozen=True)
class RayEngineFleet:
    """Engines as the weight sync sees them (protocol EngineFleet). Picklable: made by the manager, used by the trainer.

    Attributes:
        names: unique in the run. A url is used again by the next engine in the same slot, a name is not.
    """

    handles: Sequence[Any]
    engines: Sequence[EngineInfo]
    names: Sequence[str] = ()

    def only(self, indices: Sequence[int]) -> RayEngineFleet:
        """The fleet of the engines at ``indices``."""
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
        # stored once for all engines: as an argument of a call it would be stored for each
        kwargs = {name: ray.put(value) if isinstance(value, bytes) else value for name, value in kwargs.items()}
        refs = [getattr(handle, verb).remote(**kwargs, **own) for handle, own in zip(self.handles, extra, strict=True)]
        return RayCalls(refs, verb, [engine.url for engine in self.engines])


@dataclass(frozen=True)
class WaitingEngines:
    """Engines that need weights before they can serve.

    Attributes:
        fleet: engines that have restarted and wait for weights. May be empty.
        num_serving: engines that the router sends requests to.
    """

    fleet: RayEngineFleet
    num_serving: int


def silent_engines(error: BaseException, fleet: RayEngineFleet) -> list[str]:
    """Names of the engines of ``fleet`` that did not answer, if ``error`` is an EngineSilent of any process."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    urls = error.urls if isinstance(error, EngineSilent) else ()
    return [name for name, engine in zip(fleet.names, fleet.engines, strict=True) if engine.url in urls]


def log_deaths(names: Sequence[str], during: str, error: Exception) -> None:
    """Log that the engines ``names`` died of a call that ended with ``error``."""
    dead = ", ".join(name.partition(".")[0] for name in names)
    logger.warning("engine %s died during %s: %s", dead, during, message_of(error) or error)


class EngineMemory(ABC):
    """The memory verbs, for the owner of engines.

    All verbs may be repeated: SGLang is asked only for memory that is released or held. A verb skips engines that died
    meanwhile. Engines that restarted hold their memory already.

    Attributes:
        memory_timeout_s: of each call to all engines.
        replaces_dead: dead engines are replaced. Otherwise the death of one raises an error.
    """

    memory_timeout_s: float
    replaces_dead: bool

    @property
    @abstractmethod
    def fleet(self) -> RayEngineFleet:
        """Living engines that receive weights, on any devices."""

    @abstractmethod
    def offloadable(self) -> RayEngineFleet:
        """Living engines on devices of the trainer."""

    @abstractmethod
    def lost(self, names: Sequence[str]) -> list[str]:
        """The engines of these names that are dead now."""

    @abstractmethod
    def pause_watch(self) -> None:
        """Pause health checks until :meth:`resume_watch`."""

    @abstractmethod
    def resume_watch(self) -> None: ...

    def offload(self) -> None:
        """Release all memory."""
        self.pause_watch()  # engines without memory do not answer health checks
        # The order matters: the cache can be flushed only without running requests.
        self._on(self.offloadable, "pause_generation", mode="abort")
        self._on(self.offloadable, "flush_cache")
        self._on(self.offloadable, "release_memory_occupation", tags=MEMORY_TAGS)

    def onload_weights(self) -> None:
        """Take memory for weights. It is empty unless the engine keeps a copy of its weights."""
        self._on(self.offloadable, "resume_memory_occupation", tags=("weights",))

    def onload_kv(self) -> None:
        """Take all memory and serve."""
        self._on(self.offloadable, "resume_memory_occupation", tags=MEMORY_TAGS)
        self._on(self.offloadable, "continue_generation")
        # Engines on other devices were paused for the sync as well.
        self._on(lambda: self.fleet, "continue_generation")
        self.resume_watch()

    def _on(self, living: Callable[[], RayEngineFleet], verb: str, **kwargs: Any) -> None:
        """Call ``verb`` on all engines of ``living``. If one dies, repeat it on the others."""
        while (fleet := living()).engines:
            try:
                fleet.start(verb, **kwargs).wait(self.memory_timeout_s)
                return
            except Exception as error:  # an error of any kind may be the consequence of a death
                lost = self.lost(fleet.names) if self.replaces_dead else []
                if not lost:
                    raise
                log_deaths(lost, verb, error)
