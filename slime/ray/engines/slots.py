"""The engines of one router by slot: their state, and the replacement of dead engines.

    SERVING   registered at the router, has the weights of the others
       | found dead
    STARTING  removed from the router and killed. A new actor starts a server on the same devices
       | its server answers
    WAITING   unregistered, because it has the weights of the checkpoint (skipped if those are right)
       | the trainer has sent weights, the owner admits the engine
    SERVING

The fourth death in a slot ends the run. The run also ends if every engine died again soon after its restart, before
anything was generated.

Without ``--use-fault-tolerance`` a dead engine is not replaced. The next call of ``waiting()`` raises the cause of its
death.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from slime.backends.protocols import EngineInfo
from slime.backends.sglang_utils.router import remove_worker
from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines
from slime.ray.engines.health import Answer, HealthMonitor
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.waiting import get
from slime.utils.errors import EngineError, SlimeError

logger = logging.getLogger(__name__)

_MAX_DEATHS = 3
_PAUSES_S = (1.0, 2.0, 4.0)  # before the next try to start an engine: the obstacle may be gone by then
_SOON_S = 30.0  # a death earlier than this after a restart counts as "died again"
_LOOK_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 15.0
_CONTROL_TIMEOUT_S = 60.0


class _State(StrEnum):
    STARTING = "starting"
    WAITING = "waiting"
    SERVING = "serving"


@dataclass
class _Slot:
    """The devices of one engine.

    Attributes:
        handle: actor that runs or starts there, if any.
        ready_at: end of the last restart.
        has_died_again: the engine died soon after its restart, and nothing was generated in between.
    """

    rank: int
    handle: Any = None
    info: EngineInfo | None = None
    state: _State = _State.STARTING
    deaths: int = 0
    died_at: float = 0.0
    ready_at: float = -math.inf
    has_died_again: bool = False

    @property
    def name(self) -> str:
        """Name of the present engine."""
        return f"{self.rank}.{self.deaths}"


@dataclass(frozen=True)
class WatchSettings:
    """Seconds of the health checks and of the start of an engine, from the flags of the same names.

    Attributes:
        later_wait_s: after a weight sync. None: ``first_wait_s``.
        replaces_dead: if False, only ended processes are noticed, and the first one ends the run.
    """

    interval_s: float
    timeout_s: float
    first_wait_s: float
    start_timeout_s: float
    replaces_dead: bool = True
    later_wait_s: float | None = None


class EngineSlots:
    """All engines of one router.

    Args:
        make: (rank, number of earlier deaths in the slot) -> handle of a new actor. Does not wait for its start.
        ranks: numbers of the engines in the run.
        needs_weights: False if the weights of the checkpoint are right. Such engines never wait.
    """

    def __init__(
        self, make: Callable[[int, int], Any], ranks: Sequence[int], router_url: str, *, needs_weights: bool = True
    ) -> None:
        self._make = make
        self._router_url = router_url
        self._needs_weights = needs_weights
        self._by_rank: dict[int, _Slot] = {}
        self._slots: list[_Slot] = []
        self._starting: list[tuple[_Slot, Any]] = []
        self._guard = threading.Lock()  # slots, their states and handles, and the failure
        self._failure: Exception | None = None
        self._progress_at = -math.inf
        self._stopping = threading.Event()
        self._settings: WatchSettings | None = None
        self._monitor: HealthMonitor | None = None
        self.start(ranks)

    def start(self, ranks: Sequence[int]) -> None:
        """Start the engines of these numbers. :meth:`wait_ready` waits for them."""
        slots = [_Slot(rank, self._make(rank, 0)) for rank in ranks]
        with self._guard:
            self._slots = [*self._slots, *slots]
            self._by_rank |= {slot.rank: slot for slot in slots}
        self._starting = [(slot, slot.handle.start_and_register.remote(self._router_url)) for slot in slots]

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every engine that was started is registered at the router."""
        starting, self._starting = self._starting, []
        infos = get([ref for _, ref in starting], timeout_s, f"{len(starting)} engines to start")
        for (slot, _), info in zip(starting, infos, strict=True):
            slot.info, slot.state = info, _State.SERVING

    def watch(self, settings: WatchSettings) -> None:
        """Start the health checks and the replacement of dead engines."""
        self._settings = settings
        self._monitor = HealthMonitor(
            self._find_ended,
            self._ask,
            self._on_dead,
            interval_s=settings.interval_s,
            first_wait_s=settings.first_wait_s if settings.replaces_dead else math.inf,
            later_wait_s=settings.later_wait_s if settings.replaces_dead else math.inf,
        )
        self._monitor.start()

    def fleet(self) -> RayEngineFleet:
        """The engines that can take weights: those that serve, and those that wait for weights."""
        return self._fleet_of(_State.SERVING, _State.WAITING)

    def waiting(self) -> WaitingEngines:
        """The engines that need weights. Raises when an engine cannot be kept alive."""
        if self._failure is not None:
            raise self._failure
        serving = self._fleet_of(_State.SERVING)
        return WaitingEngines(self._fleet_of(_State.WAITING), len(serving.engines))

    def pause_watch(self) -> None:
        """Pause health checks until :meth:`resume_watch`."""
        if self._monitor is not None:
            self._monitor.pause()

    def resume_watch(self) -> None:
        if self._monitor is not None:
            self._monitor.resume()

    def look(self) -> None:
        """Look for dead engines now."""
        if self._monitor is not None:
            self._monitor.look()

    def note_progress(self) -> None:
        """Record that engines have generated something: earlier deaths after a restart were chance."""
        with self._guard:
            self._progress_at = time.monotonic()
            for slot in self._slots:
                slot.has_died_again = False

    def mark_dead(self, names: Sequence[str]) -> None:
        """Replace the engines of these names, which do not answer, if dead engines are replaced."""
        if self._settings is None or not self._settings.replaces_dead:
            return
        for slot in self._slots:
            if slot.name in names:
                self._on_dead(slot.rank, "it did not answer during a weight sync")

    def admit(self, names: Sequence[str]) -> None:
        """Let the waiting engines of these names serve: they have the weights of the others."""
        for slot in self._slots:
            with self._guard:
                is_admitted = slot.state is _State.WAITING and slot.name in names
                handle = slot.handle
            if is_admitted:
                self._admit(slot, handle)

    def raise_if_dead(self) -> None:
        """Look now, and raise the cause of a death that is not repaired."""
        self.look()
        if self._failure is not None:
            raise self._failure

    def stop(self, *, leaves_router: bool) -> None:
        """Stop all engines. ``leaves_router``: the router continues, so it must forget them."""
        with self._guard:
            self._stopping.set()
        if self._monitor is not None:
            self._monitor.stop()
        with self._guard:
            handles = [slot.handle for slot in self._slots if slot.handle is not None]
            urls = [slot.info.url for slot in self._slots if slot.info is not None]
        try:
            for url in urls if leaves_router else ():
                remove_worker(self._router_url, url)
        except EngineError as error:
            logger.warning("the router still knows engines of this run: %s", error)
        try:
            get([handle.stop.remote() for handle in handles], _STOP_TIMEOUT_S, "engines to stop")
        except (RayError, SlimeError) as error:  # killing the actor kills its server as well
            logger.warning("an engine did not stop by itself: %s", error)
        for handle in handles:
            ray.kill(handle)

    def _fleet_of(self, *states: _State) -> RayEngineFleet:
        with self._guard:
            chosen = [(slot.handle, slot.info, slot.name) for slot in self._slots if slot.state in states]
        handles, infos, names = zip(*chosen, strict=True) if chosen else ((), (), ())
        return RayEngineFleet(handles, infos, names)

    def _find_ended(self) -> dict[int, bool]:
        with self._guard:
            watched = {slot.rank: slot.handle for slot in self._slots if slot.state is not _State.STARTING}
        calls = {rank: handle.has_ended.remote() for rank, handle in watched.items()}
        done = set(ray.wait(list(calls.values()), num_returns=len(calls), timeout=_LOOK_TIMEOUT_S)[0]) if calls else ()
        return {rank: call in done and _value(call, if_dead=True) for rank, call in calls.items()}

    def _ask(self, rank: int) -> Answer:
        assert self._settings is not None
        timeout_s = self._settings.timeout_s
        asked_at = time.monotonic()
        with self._guard:
            slot = self._by_rank[rank]
            handle, is_serving = slot.handle, slot.state is _State.SERVING
        if not is_serving:
            return lambda: True  # an engine that takes weights is paused and cannot answer
        call = handle.is_responsive.remote(timeout_s)

        def answer() -> bool | None:
            if ray.wait([call], timeout=0)[0]:
                return _value(call, if_dead=False)
            return None if time.monotonic() < asked_at + timeout_s + _LOOK_TIMEOUT_S else False

        return answer

    def _on_dead(self, rank: int, reason: str) -> None:
        slot = self._by_rank[rank]
        with self._guard:
            # STARTING: its replacement is already under way. Monitor and weight sync may both report a death.
            if self._stopping.is_set() or slot.state is _State.STARTING:
                return
            slot.state = _State.STARTING
            slot.died_at = time.monotonic()
            # Not if something was generated since the restart: then restarts do help.
            slot.has_died_again = self._progress_at < slot.ready_at and slot.died_at < slot.ready_at + _SOON_S
        assert self._settings is not None
        if not self._settings.replaces_dead:
            self._failure = self._cause_of_death(slot.handle) or EngineError(f"engine {rank}: {reason}.")
            return
        threading.Thread(target=self._replace, args=(slot, reason), name=f"engine {rank} again", daemon=True).start()

    def _replace(self, slot: _Slot, reason: str) -> None:
        """Start engines in ``slot`` until one answers, too many have died there, or the run ends. Body of a thread."""
        cause = f"engine {slot.rank}: {reason}"
        try:
            for pause_s in itertools.chain([0.0], _PAUSES_S):
                if self._stopping.wait(pause_s):
                    return
                slot.deaths += 1
                cause = self._clean_up(slot, cause)
                logger.warning("%s", cause)
                if slot.deaths > _MAX_DEATHS:
                    raise EngineError(
                        f"--use-fault-tolerance: engine {slot.rank} died {slot.deaths} times in this run, which is "
                        f"more than the {_MAX_DEATHS} that are replaced. Last time: {cause}"
                    )
                # A single engine that dies again may have a bad device. If all do, they have a common cause.
                if all(each.has_died_again for each in self._slots):
                    raise EngineError(
                        f"--use-fault-tolerance: every engine died again within {_SOON_S:g} s of being started again, "
                        f"before anything was generated, so another start would not help. The last one: {cause}"
                    )
                try:
                    self._start_again(slot)
                    return
                except Exception as error:  # whatever it was, the next try may succeed
                    cause = f"engine {slot.rank} could not be started again: {_text(error)}"
        except Exception as error:  # the driver raises it with its next question
            self._failure = error

    def _clean_up(self, slot: _Slot, reason: str) -> str:
        """Remove the dead engine from the router and free its devices. Returns the cause of its death."""
        handle, info = slot.handle, slot.info
        if info is not None:
            try:
                remove_worker(self._router_url, info.url)
            except EngineError as error:
                logger.warning("the router still knows engine %d: %s", slot.rank, error)
        if handle is None:
            return reason
        cause = self._cause_of_death(handle)
        if cause is not None and _text(cause) not in reason:
            reason = f"{reason}. {_text(cause)}"
        try:
            get(handle.stop.remote(), _LOOK_TIMEOUT_S, "a dead engine to stop")
        except (RayError, SlimeError) as error:  # killing the actor kills its server as well
            logger.debug("%s", error)
        ray.kill(handle)
        with self._guard:
            slot.handle = slot.info = None
        return reason

    @staticmethod
    def _cause_of_death(handle: Any) -> Exception | None:
        """The cause of the engine's death, if its actor knows it."""
        try:
            get(handle.raise_if_dead.remote(), _LOOK_TIMEOUT_S, "the cause of an engine's death")
        except Exception as error:  # the error is the answer
            return error
        return None

    def _start_again(self, slot: _Slot) -> None:
        assert self._settings is not None
        with self._guard:
            if self._stopping.is_set():  # under the guard: stop() would not kill an actor that is made after it
                return
            slot.handle = handle = self._make(slot.rank, slot.deaths)
        waits = self._needs_weights
        started = handle.start_unregistered.remote() if waits else handle.start_and_register.remote(self._router_url)
        limit_s = self._settings.start_timeout_s + _CONTROL_TIMEOUT_S
        info = get(started, limit_s, f"engine {slot.rank} to start again")
        assert self._monitor is not None
        self._monitor.renew(slot.rank)  # before the state changes: checks of the dead engine must not count
        with self._guard:
            slot.info, slot.state = info, _State.WAITING if waits else _State.SERVING
            slot.ready_at = time.monotonic()
        seconds = slot.ready_at - slot.died_at
        logger.info("engine %d started again at %s, %.1f s after its death was noticed", slot.rank, info.url, seconds)
        if not waits:
            _log_service(slot)

    def _admit(self, slot: _Slot, handle: Any) -> None:
        try:
            get(handle.register.remote(self._router_url), _CONTROL_TIMEOUT_S, f"engine {slot.rank} to register")
        except (RayError, SlimeError) as error:  # it or the router died just now: the monitor or the rollout notices
            logger.warning("engine %d could not be registered at the router: %s", slot.rank, _text(error))
            return
        with self._guard:
            # The engine may have died and been replaced during the call, which ran without the guard.
            if slot.state is _State.WAITING and slot.handle is handle:
                slot.state = _State.SERVING
        _log_service(slot)


def _log_service(slot: _Slot) -> None:
    seconds = time.monotonic() - slot.died_at
    logger.info("engine %d serves again, %.1f s after its death was noticed", slot.rank, seconds)


def _value(call: Any, *, if_dead: bool) -> bool:
    """The result of a finished call. ``if_dead`` if the actor of the call is dead."""
    try:
        return bool(ray.get(call))
    except ActorDiedError:
        return if_dead
    except Exception as error:  # Ray raises the error of the actor in its own type
        logger.warning("an engine could not be looked at: %s", _text(error))
        return False


def _text(error: BaseException) -> str:
    return message_of(error) or f"{type(error).__name__}: {error}"
