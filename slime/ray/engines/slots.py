"""The engines of one router by slot: their state, and the replacement of dead engines.

    SERVING   registered at the router, has the weights of the others
       | found dead
    STARTING  removed from the router and killed. A new actor starts a server on the same devices
       | its server answers
    WAITING   unregistered, because it has the weights of the checkpoint (skipped if those are right)
       | the trainer has sent weights, the owner admits the engine
    SERVING
       | asked to leave, or its server got SIGTERM
    LEAVING   still serves, and takes part in a weight sync that runs
       | no sync runs
    DRAINING  removed from the router. Its requests are aborted with their tokens, and other engines continue them
       | no request is left, or the deadline passed
    (gone)    or STARTING: with fault tolerance an engine that got SIGTERM is replaced, which is no death

The fourth death in a slot ends the run, and so does a death of every engine soon after its restart, before anything was
generated. Without ``--use-fault-tolerance`` the next call of ``waiting()`` raises the cause of a death.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from slime.backends.sglang_utils.router import remove_worker
from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines
from slime.ray.engines.health import Answer, HealthMonitor
from slime.ray.engines.slot import (
    Slot,
    State,
    WatchSettings,
    asked,
    asked_whether_responsive,
    cause_of_death,
    clean_up,
    drain,
    log_service,
    text_of,
)
from slime.ray.watch import get
from slime.utils.errors import EngineError, SlimeError

logger = logging.getLogger(__name__)

_MAX_DEATHS = 3
_PAUSES_S = (1.0, 2.0, 4.0)  # before the next try to start an engine: the obstacle may be gone by then
_SOON_S = 30.0  # a death earlier than this after a restart counts as "died again"
_STOP_TIMEOUT_S = 15.0
_CONTROL_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 20.0  # less than the 30 s between SIGTERM and SIGKILL that cluster managers give
_POLL_S = 0.1


class EngineSlots:
    """All engines of one router.

    Args:
        make: (rank, number of earlier engines in the slot) -> handle of a new actor. Does not wait for its start.
        ranks: numbers of the engines in the run.
        needs_weights: False if the weights of the checkpoint are right. Such engines never wait.
        kind_of: kind of the engine of a number. One of each kind must serve.
        on_gone: called with the number of an engine that has left and is not replaced.
    """

    def __init__(
        self,
        make: Callable[[int, int], Any],
        ranks: Sequence[int],
        router_url: str,
        *,
        needs_weights: bool = True,
        kind_of: Callable[[int], str] = lambda rank: "",
        on_gone: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._make = make
        self._kind_of = kind_of
        self._on_gone = on_gone
        self._router_url = router_url
        self._needs_weights = needs_weights
        self._by_rank: dict[int, Slot] = {}
        self._slots: list[Slot] = []
        self._starting: list[tuple[Slot, Any]] = []
        self._guard = threading.Lock()  # slots, their states and handles, and the failure
        self._failure: Exception | None = None
        self._progress_at = -math.inf
        self._numbers: dict[int, int] = {}  # of the next engine, in slots that engines have left
        self._stopping = threading.Event()
        self._is_paused = False
        self._settings: WatchSettings | None = None
        self._monitor: HealthMonitor | None = None
        self.start(ranks)

    def start(self, ranks: Sequence[int]) -> None:
        """Start the engines of these numbers. :meth:`wait_ready` waits for them."""
        numbers = {rank: self._numbers.get(rank, 0) for rank in ranks}
        slots = [Slot(rank, self._make(rank, number), number=number) for rank, number in numbers.items()]
        with self._guard:
            self._slots = [*self._slots, *slots]
            self._by_rank |= {slot.rank: slot for slot in slots}
        self._starting = [(slot, slot.handle.start_and_register.remote(self._router_url)) for slot in slots]

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every engine that was started is registered at the router."""
        starting, self._starting = self._starting, []
        infos = get([ref for _, ref in starting], timeout_s, f"{len(starting)} engines to start")
        for (slot, _), info in zip(starting, infos, strict=True):
            slot.info, slot.state = info, State.SERVING

    def join(self, rank: int, *, is_guest: bool = False) -> None:
        """Start an engine beside the others. It serves as soon as it has weights. Returns at once.

        Args:
            is_guest: if it dies, it is not replaced.
        """
        slot = Slot(rank, number=self._numbers.get(rank, 0), is_guest=is_guest, has_joined=True)
        with self._guard:
            self._slots = [*self._slots, slot]
            self._by_rank[rank] = slot
        threading.Thread(target=self._enter, args=(slot,), name=f"engine {rank} joins", daemon=True).start()

    def leave(self, rank: int, reason: str, *, returns: bool = False) -> None:
        """Let an engine end without losing tokens, in a thread. With ``returns`` another one takes its slot.

        Raises:
            EngineError: it does not serve, or no other engine does.
        """
        with self._guard:
            slot = self._by_rank.get(rank)
            if slot is None or slot.state not in (State.SERVING, State.WAITING):
                state = slot.state if slot else "unknown"
                raise EngineError(f"engine {rank} cannot leave: it is {state}. Engines that serve can.")
            if not returns and not self._others_serve(slot):
                other = f"{self._kind_of(rank)} engine".strip()
                raise EngineError(f"engine {rank} cannot leave: no other {other} serves. Let another one join first.")
            slot.state, slot.returns = State.LEAVING, returns  # from now on its end is no death
        threading.Thread(target=self._drain, args=(slot, reason), name=f"engine {rank} leaves", daemon=True).start()

    def states(self) -> dict[int, tuple[str, str | None]]:
        """Number of each engine -> its state and its address, if known."""
        with self._guard:
            return {slot.rank: (slot.shown_state, None if slot.info is None else slot.info.url) for slot in self._slots}

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
        """The engines that can take weights: those that get requests or will, and those that wait for weights."""
        return self._fleet_of(State.SERVING, State.WAITING, State.LEAVING)

    def waiting(self) -> WaitingEngines:
        """The engines that need weights. Raises when an engine cannot be kept alive."""
        if self._failure is not None:
            raise self._failure
        serving = self._fleet_of(State.SERVING)
        return WaitingEngines(self._fleet_of(State.WAITING), len(serving.engines))

    def pause_watch(self) -> None:
        """Pause health checks until :meth:`resume_watch`. Engines that leave have left before, or do it afterwards."""
        with self._guard:
            self._is_paused = True
        if self._monitor is not None:
            self._monitor.pause()
        # An engine without the new weights must not be listed at the router afterwards.
        for _ in range(round(3 * _LEAVE_TIMEOUT_S / _POLL_S)):
            if not any(slot.state is State.DRAINING for slot in self._slots) or self._stopping.wait(_POLL_S):
                return
        logger.warning("an engine that leaves has not left after %g s: the sync excludes it", 3 * _LEAVE_TIMEOUT_S)

    def resume_watch(self) -> None:
        self._is_paused = False
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
                is_admitted = slot.state is State.WAITING and slot.name in names
                slot.is_registering |= is_admitted
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

    def _fleet_of(self, *states: State) -> RayEngineFleet:
        with self._guard:
            chosen = [(slot.handle, slot.info, slot.name) for slot in self._slots if slot.state in states]
        handles, infos, names = zip(*chosen, strict=True) if chosen else ((), (), ())
        return RayEngineFleet(handles, infos, names)

    def _find_ended(self) -> dict[int, bool]:
        with self._guard:
            present = [s for s in self._slots if s.state in (State.SERVING, State.WAITING, State.LEAVING)]
            watched = {slot.rank: slot.handle for slot in present}
            leaving = {slot.rank for slot in present if slot.state is State.LEAVING}
        has_ended = asked({rank: handle.has_ended.remote() for rank, handle in watched.items()}, if_dead=True)
        if not self._is_paused:
            living = {rank: handle for rank, handle in watched.items() if not has_ended[rank] and rank not in leaving}
            notices = asked({rank: handle.is_leaving.remote() for rank, handle in living.items()}, if_dead=False)
            for rank in (rank for rank, is_leaving in notices.items() if is_leaving):
                self._on_notice(rank)
        return has_ended

    def _on_notice(self, rank: int) -> None:
        """Let an engine leave whose server got SIGTERM. It is replaced if dead engines are."""
        assert self._settings is not None
        slot = self._by_rank.get(rank)
        returns = self._settings.replaces_dead and slot is not None and not slot.is_guest
        try:
            self.leave(rank, "its process got SIGTERM", returns=returns)
        except EngineError as error:  # its end will be that of a dead engine
            logger.warning("engine %d got SIGTERM. %s", rank, error)

    def _ask(self, rank: int) -> Answer:
        assert self._settings is not None
        with self._guard:
            slot = self._by_rank.get(rank)
            handle = slot.handle if slot is not None and slot.state is State.SERVING else None
        if handle is None:
            return lambda: True  # an engine that takes weights is paused and cannot answer
        return asked_whether_responsive(handle, self._settings.timeout_s)

    def _on_dead(self, rank: int, reason: str) -> None:
        with self._guard:
            slot = self._by_rank.get(rank)  # None: it has left while somebody looked
            if slot is None or self._stopping.is_set():
                return
            if slot.state is State.LEAVING:
                slot.state = State.DRAINING  # the sync that it takes part in loses it, and its thread goes on
            # STARTING: its replacement is already under way. Monitor and weight sync may both report a death.
            if slot.state not in (State.SERVING, State.WAITING):
                return
            is_lost = slot.is_guest and self._others_serve(slot)
            slot.state = State.STARTING
            slot.died_at = time.monotonic()
            # Not if something was generated since the restart: then restarts do help.
            slot.has_died_again = self._progress_at < slot.ready_at and slot.died_at < slot.ready_at + _SOON_S
        if is_lost:
            threading.Thread(target=self._lose, args=(slot, reason), name=f"engine {rank} lost", daemon=True).start()
            return
        assert self._settings is not None
        if not self._settings.replaces_dead:
            self._failure = cause_of_death(slot.handle) or EngineError(f"engine {rank}: {reason}.")
            return
        threading.Thread(target=self._replace, args=(slot, reason), name=f"engine {rank} again", daemon=True).start()

    def _replace(self, slot: Slot, reason: str, *, may_go: bool = False) -> None:
        """Start engines in ``slot`` until one answers, too many have died there, or the run ends. Body of a thread.

        Args:
            may_go: if none starts, the run goes on without the engine, as without one that has joined.
        """
        cause = f"engine {slot.rank}: {reason}"
        try:
            for pause_s in itertools.chain([0.0], _PAUSES_S):
                if self._stopping.wait(pause_s):
                    return
                slot.deaths, slot.number = slot.deaths + 1, slot.number + 1
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
                    cause = f"engine {slot.rank} could not be started again: {text_of(error)}"
            raise EngineError(f"{cause}. It was tried {len(_PAUSES_S) + 1} times.")
        except Exception as error:
            with self._guard:
                is_lost = (may_go or slot.has_joined) and self._others_serve(slot)
            if is_lost:
                self._lose(slot, text_of(error))
            else:
                self._failure = error  # the driver raises it with its next question

    def _enter(self, slot: Slot) -> None:
        """Start an engine that joins. A failure does not end the run. Body of a thread."""
        slot.died_at = time.monotonic()
        try:
            self._start_again(slot)
        except (RayError, SlimeError) as error:  # the engines before it go on
            self._lose(slot, f"it could not join: {text_of(error)}")

    def _drain(self, slot: Slot, reason: str) -> None:
        """End an engine once it has no requests. Body of a thread."""
        while not self._begins_to_drain(slot):
            if self._stopping.wait(_POLL_S):
                return
        logger.info("engine %d leaves: %s", slot.rank, reason)
        assert slot.info is not None
        started = time.monotonic()
        try:
            drain(slot.handle, self._router_url, slot.info.url, _LEAVE_TIMEOUT_S, self._stopping)
        except (RayError, SlimeError) as error:  # its requests are repeated, like those of a dead engine
            logger.warning("engine %d ended before its requests were returned: %s", slot.rank, text_of(error))
        if self._stopping.is_set():
            return
        logger.info("engine %d has left, %.1f s after it was asked to", slot.rank, time.monotonic() - started)
        if not slot.returns:
            self._lose(slot, reason)
            return
        slot.deaths, slot.has_died_again, slot.died_at = slot.deaths - 1, False, started  # it did not die
        slot.state = State.STARTING
        self._replace(slot, reason, may_go=True)  # its node may have gone

    def _begins_to_drain(self, slot: Slot) -> bool:
        """False during a weight sync, in which the engine takes part, and while the router adds it."""
        with self._guard:
            if not self._is_paused and not slot.is_registering and slot.state is State.LEAVING:
                slot.state = State.DRAINING
            return slot.state is State.DRAINING

    def _others_serve(self, slot: Slot) -> bool:
        """Whether the run can go on without an engine. Called with the guard."""
        kind = self._kind_of(slot.rank)
        others = [other for other in self._slots if other is not slot and other.state is State.SERVING]
        return any(self._kind_of(other.rank) == kind for other in others)

    def _lose(self, slot: Slot, reason: str) -> None:
        """Clean up after an engine that is not replaced."""
        logger.info("engine %d is gone: %s", slot.rank, self._clean_up(slot, reason))
        with self._guard:
            self._slots = [other for other in self._slots if other is not slot]
            self._by_rank.pop(slot.rank, None)
            self._numbers[slot.rank] = slot.number + 1
        self._on_gone(slot.rank)

    def _clean_up(self, slot: Slot, reason: str) -> str:
        reason = clean_up(slot, self._router_url, reason)
        with self._guard:
            slot.handle = slot.info = None
        return reason

    def _start_again(self, slot: Slot) -> None:
        assert self._settings is not None
        with self._guard:
            if self._stopping.is_set():  # under the guard: stop() would not kill an actor that is made after it
                return
            slot.handle = handle = self._make(slot.rank, slot.number)
        waits = self._needs_weights
        started = handle.start_unregistered.remote() if waits else handle.start_and_register.remote(self._router_url)
        limit_s = self._settings.start_timeout_s + _CONTROL_TIMEOUT_S
        info = get(started, limit_s, f"engine {slot.rank} to start again")
        assert self._monitor is not None
        self._monitor.renew(slot.rank)  # before the state changes: checks of the dead engine must not count
        with self._guard:
            slot.info, slot.state = info, State.WAITING if waits else State.SERVING
            slot.ready_at = time.monotonic()
        seconds = slot.ready_at - slot.died_at
        if slot.number:
            text = "engine %d started again at %s, %.1f s after its death was noticed"
        else:
            text = "engine %d started at %s in %.1f s"
        logger.info(text, slot.rank, info.url, seconds)
        if not waits:
            log_service(slot)

    def _admit(self, slot: Slot, handle: Any) -> None:
        try:
            get(handle.register.remote(self._router_url), _CONTROL_TIMEOUT_S, f"engine {slot.rank} to register")
        except (RayError, SlimeError) as error:  # it or the router died just now: the monitor or the rollout notices
            logger.warning("engine %d could not be registered at the router: %s", slot.rank, text_of(error))
            return
        finally:
            slot.is_registering = False
        with self._guard:
            # The engine may have died and been replaced during the call, which ran without the guard.
            if slot.state is State.WAITING and slot.handle is handle:
                slot.state = State.SERVING
        log_service(slot)
