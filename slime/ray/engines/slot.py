"""One engine of a router: its state, questions to its actor, and its last seconds if it leaves."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from slime.backends import EngineInfo
from slime.backends.sglang_utils.router import registered_workers, remove_worker
from slime.ray.engines.health import Answer
from slime.ray.watch import get
from slime.ray.watch.failure_report import message_of
from slime.utils.async_utils import Deadline
from slime.utils.errors import DeadlineExceeded, EngineError, SlimeError, kept, named, reported

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 5.0
_REPEAT_S = 0.25


class State(StrEnum):
    STARTING = "starting"
    WAITING = "waiting"
    SERVING = "serving"
    LEAVING = "leaving"
    DRAINING = "draining"


@dataclass
class Slot:
    """The devices of one engine.

    Attributes:
        handle: actor that runs or starts there, if any.
        number: engines that were in this slot before.
        is_guest: it joined by its address. It is not replaced.
        has_joined: it is not one of the start. The run goes on without it if it cannot be started again.
        returns: another engine takes the place of the one that leaves.
        is_registering: the router is asked to add it.
        ready_at: end of the last restart.
        has_died_again: the engine died soon after its restart, and nothing was generated in between.
    """

    rank: int
    handle: Any = None
    info: EngineInfo | None = None
    state: State = State.STARTING
    number: int = 0
    deaths: int = 0
    is_guest: bool = False
    has_joined: bool = False
    returns: bool = False
    is_registering: bool = False
    died_at: float = 0.0
    ready_at: float = -math.inf
    has_died_again: bool = False

    @property
    def name(self) -> str:
        """Name of the present engine."""
        return f"{self.rank}.{self.number}"

    @property
    def shown_state(self) -> str:
        """The state for people. "preempted": it leaves, and another engine takes its place."""
        is_leaving = self.state in (State.LEAVING, State.DRAINING)
        return "preempted" if is_leaving and self.returns else self.state.value


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


def log_service(slot: Slot) -> None:
    now = time.monotonic()
    if slot.number:
        logger.info("engine %d serves again, %.1f s after its death was noticed", slot.rank, now - slot.died_at)
    else:
        logger.info("engine %d serves, %.1f s after it had started", slot.rank, now - slot.ready_at)


def asked(calls: dict[int, Any], *, if_dead: bool) -> dict[int, bool]:
    """The answers of engines that answer within seconds. False for the others."""
    done = set(ray.wait(list(calls.values()), num_returns=len(calls), timeout=LOOK_TIMEOUT_S)[0]) if calls else ()
    return {rank: call in done and value_of(call, if_dead=if_dead) for rank, call in calls.items()}


def asked_whether_responsive(handle: Any, timeout_s: float) -> Answer:
    """Send a health check to an engine. Call the result for the answer so far."""
    until = time.monotonic() + timeout_s + LOOK_TIMEOUT_S
    call = handle.is_responsive.remote(timeout_s)

    def answer() -> bool | None:
        if ray.wait([call], timeout=0)[0]:
            return value_of(call, if_dead=False)
        return None if time.monotonic() < until else False

    return answer


def value_of(call: Any, *, if_dead: bool) -> bool:
    """The result of a finished call. ``if_dead`` if the actor of the call is dead."""
    # Ray raises the error of the actor in its own type
    with reported(lambda error: logger.warning("an engine could not be looked at: %s", text_of(error))):
        try:
            return bool(ray.get(call))
        except ActorDiedError:
            return if_dead
    return False


def text_of(error: BaseException) -> str:
    return message_of(error) or named(error)


def cause_of_death(handle: Any) -> Exception | None:
    """The cause of an engine's death, if its actor knows it."""
    errors: list[Exception] = []
    with kept(errors):  # the error is the answer
        get(handle.raise_if_dead.remote(), LOOK_TIMEOUT_S, "the cause of an engine's death")
    return errors[0] if errors else None


def clean_up(slot: Slot, router_url: str, reason: str) -> str:
    """Remove a dead engine from its router and free its devices. Returns ``reason`` with the cause of its death."""
    handle, info = slot.handle, slot.info
    if info is not None:
        try:
            remove_worker(router_url, info.url)
        except EngineError as error:
            logger.warning("the router still knows engine %d: %s", slot.rank, error)
    if handle is None:
        return reason
    cause = cause_of_death(handle)
    if cause is not None and text_of(cause) not in reason:
        reason = f"{reason}. {text_of(cause)}"
    try:
        get(handle.stop.remote(), LOOK_TIMEOUT_S, "a dead engine to stop")
    except (RayError, SlimeError) as error:  # killing the actor kills its server as well
        logger.debug("%s", error)
    ray.kill(handle)
    return reason


def drain(handle: Any, router_url: str, url: str, timeout_s: float, stopping: threading.Event) -> None:
    """Return when an engine that leaves has no requests, or after ``timeout_s`` with a warning.

    It gets no new requests, and its running ones return with their tokens. The rollout continues them on another engine
    (``custom_generate.until_finished``).

    Args:
        handle: of the engine's actor.
        stopping: set if the run ends, which ends the wait.

    Raises:
        EngineError, RayError: the engine ended meanwhile.
        DeadlineExceeded: it does not answer.
    """
    deadline = Deadline(timeout_s, f"the requests of {url} to return", "The rollout repeats them on other engines")
    was_idle = False
    while True:
        is_listed = _forget(router_url, url)
        # Repeated, because a request may have been on its way from the router during the last abort.
        get(handle.abort_all.remote(), _CALL_TIMEOUT_S, f"{url} to abort its requests")
        is_idle = not get(handle.num_requests.remote(), _CALL_TIMEOUT_S, f"{url} to count its requests")
        # Twice: the scheduler forgets a request before the server has sent its last reply.
        if (is_idle and was_idle and not is_listed) or stopping.wait(_REPEAT_S):
            return
        was_idle = is_idle
        try:
            deadline.check()
        except DeadlineExceeded as error:
            logger.warning("%s", error)
            return


def _forget(router_url: str, url: str) -> bool:
    """Remove the engine from its router, which takes a moment. Returns whether the router still lists it."""
    try:
        # The router answers before the removal is complete.
        if url not in registered_workers(router_url):
            return False
        remove_worker(router_url, url)
    except EngineError as error:  # a dead router ends the run elsewhere
        logger.warning("%s", error)
        return False
    return True
