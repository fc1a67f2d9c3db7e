"""``ray.get`` with a deadline and a name, for all waits of this room, and below it heartbeats and failure reports."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from slime.ray.watch.failure_report import (
    Reports,
    death_report,
    message_of,
    missing_for,
    silence_report,
    stacks_of,
    timeout_report,
)
from slime.ray.watch.heartbeat import HeartbeatWatch, WorkReport, processes_of
from slime.utils.async_utils import Deadline, raise_if_interrupted
from slime.utils.errors import SlimeError, reported

logger = logging.getLogger(__name__)

_SLICE_S = 1.0  # a wait checks for interrupts and dead peers this often
_REPORT_AFTER_S = 600.0  # a wait logs the stacks of its peers after this time, and after each doubling of it
_WORK_EVERY_S = 60.0
_PEER_DEATH_S = 2.0  # Ray may know of a death this much later than the errors that it causes in other processes


def get(
    refs: Any,
    seconds: float,
    what: str,
    fix: str = "",
    *,
    meanwhile: Callable[[], None] | None = None,
    slice_s: float = _SLICE_S,
    reports_work: bool = False,
) -> Any:
    """The values of ``refs`` (one ref or a list).

    A failed ref raises its own error at once, while others still run. If a process died, its death is raised, also if
    its peers failed before in the middle of a collective.

    Args:
        meanwhile: called about every ``slice_s`` seconds.
        reports_work: log every minute how much the awaited processes have done, for waits that take long.

    Raises:
        ProcessDied: the dead process, the cause, its last lines, and the stacks of the others.
        Interrupted: the run was asked to end.
        DeadlineExceeded: the waiter, the processes that did not answer, and their stacks.
    """
    deadline, places = Deadline(seconds, what, fix), Reports()
    is_list = isinstance(refs, Sequence)
    pending = list(refs) if is_list else [refs]
    count, watch, report_at_s = len(pending), HeartbeatWatch(), _REPORT_AFTER_S
    work, work_at_s = WorkReport(), _WORK_EVERY_S if reports_work else math.inf
    values: dict[Any, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=min(slice_s, deadline.remaining))
        if not done:
            raise_if_interrupted()
            if not deadline.remaining:
                raise timeout_report(pending, count, deadline)
            if meanwhile is not None:
                meanwhile()
            if gone := watch.look(pending):
                raise silence_report(*gone, pending, deadline)
            if places.is_due() and (missing := missing_for(pending)):
                logger.warning("has waited %.0f s for %s: %s", deadline.elapsed, deadline.what, missing)
            if deadline.elapsed > work_at_s:
                work_at_s += _WORK_EVERY_S
                done_work = work.text(processes_of(pending))
                logger.warning("has waited %.0f s for %s: %s", deadline.elapsed, what, done_work)
            if deadline.elapsed > report_at_s:
                report_at_s *= 2
                _report_long_wait(pending, deadline)
            continue
        try:
            values[done[0]] = ray.get(done[0])
        except RayActorError as death:
            raise death_report(death, pending, deadline) from None
        # A survivor of a collective fails faster than Ray reports the death that caused it: look for the cause.
        except RayTaskError as error:
            peer = None if isinstance(error.cause, SlimeError) else _death_among(pending)
            if peer is not None:
                raise death_report(peer, pending, deadline) from error
            raise
    return [values[ref] for ref in refs] if is_list else values[refs]


def _report_long_wait(pending: Sequence[Any], deadline: Deadline) -> None:
    lines = stacks_of(processes_of(pending))
    logger.warning("\n".join([f"has waited {deadline.elapsed:.0f} s for {deadline.what}", *lines]))


def raise_if_dead(actors: Sequence[Any], what: str) -> None:
    """Raise the report on the first of ``actors`` that is dead, without waiting for busy ones.

    Args:
        what: the failure that a death may have caused.
    """
    deadline = Deadline(_PEER_DEATH_S, what)
    refs = [actor.__ray_ready__.remote() for actor in actors]
    done, pending = ray.wait(refs, num_returns=len(refs), timeout=deadline.remaining)
    for ref in done:
        try:
            ray.get(ref)
        except RayActorError as death:
            raise death_report(death, pending, deadline) from None


def warned(text: str) -> AbstractContextManager[None]:
    """Work at the end of a run, which goes on after an error: ``text`` with its first line becomes a warning."""
    return reported(lambda error: logger.warning(text, (message_of(error) or str(error)).partition("\n")[0]))


def _death_among(pending: list[Any]) -> RayActorError | None:
    """The first death that ended one of the calls, or ends it within seconds."""
    deadline = Deadline(_PEER_DEATH_S, "peers to fail")
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=deadline.remaining)
        if not done:
            return None
        try:
            ray.get(done)
        except RayActorError as death:
            return death
        except RayError:
            continue  # another survivor
    return None
