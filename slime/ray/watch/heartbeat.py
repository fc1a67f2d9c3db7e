"""Finds processes that do not live any more although they have not ended, and ends them.

    no beat for --heartbeat-timeout, and the kernel says that it is stopped         it is killed
    no beat for six times as long, and it has hardly used a processor since         it is killed
    no beat, but it works, waits for a disk, or is being debugged                   a warning, once

Killing it makes it an ordinary death: its memory and its ports are free, its peers fail, and the run ends or begins
again as after any other. A process that beats and waits, for a lock or in a collective, is not touched: the wait for it
has a deadline of its own.

Used by ``waiting``: only those that somebody waits for are looked at.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.ray.watch.process_info import Card, cards_of, last_beat

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 2.0
_STUCK = 6
"""Native code may keep the interpreter for itself for a while; six times the silence that is allowed is no while."""

_IDLE = 0.1
"""Share of a processor that Ray's own threads stay below."""

_REMOTE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Vitals:
    """What the kernel says of a process: its state as psutil names it, and processor time used, in seconds."""

    state: str
    cpu_s: float


@dataclass
class _Pulse:
    """What one process said last, for how long it has not said anything else, and how it was when that was noticed."""

    beat: bytes | None
    silent_s: float = 0.0
    noticed: Vitals | None = None
    noticed_after_s: float = 0.0


class Watch:
    """The eye on those that one wait depends on.

    Time in which nobody looked does not count as silence: the one who waits may have been stopped as well.
    """

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._cards: dict[Any, list[Card]] = {}
        self._pulses: dict[str, _Pulse] = {}

    def look(self, pending: Sequence[Any]) -> tuple[Card, str] | None:
        """The first of those that work on ``pending`` that had to be killed, and why; None when all live."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_EVERY_S:
            return None
        passed, self._looked_at = min(now - self._looked_at, 2 * _LOOK_EVERY_S), now
        try:
            for card in self._watched(pending):
                reason = self._examine(card, passed)
                if reason is not None:
                    return card, reason
        except RayError as error:  # the store does not answer: nothing is known
            logger.warning("the processes' heartbeats cannot be read: %s", error)
        return None

    def _watched(self, pending: Sequence[Any]) -> list[Card]:
        for ref in pending:
            if ref not in self._cards:
                self._cards[ref] = [card for card in cards_of([ref]) if card.silence_s]
        return list({card.actor_id: card for ref in pending for card in self._cards[ref]}.values())

    def _examine(self, card: Card, passed: float) -> str | None:
        beat = last_beat(card)
        pulse = self._pulses.get(card.actor_id)
        if beat is None or pulse is None or pulse.beat != beat:
            self._pulses[card.actor_id] = _Pulse(beat)
            return None
        pulse.silent_s += passed
        if pulse.silent_s < card.silence_s:
            return None
        vitals = _on_node_of(card, _vitals)
        if vitals is None:
            return None
        if pulse.noticed is None:
            pulse.noticed, pulse.noticed_after_s = vitals, pulse.silent_s
            logger.warning("%s has given no sign of life for %.0f s (%s)", card, pulse.silent_s, vitals.state)
        reason = _why_it_is_gone(pulse, vitals, card.silence_s)
        if reason is None:
            return None
        _on_node_of(card, _kill)
        return f"{reason}: no sign of life for {pulse.silent_s:.0f} s. It was killed."


def _why_it_is_gone(pulse: _Pulse, vitals: Vitals, silence_s: float) -> str | None:
    assert pulse.noticed is not None
    match vitals.state:
        case psutil.STATUS_STOPPED:
            return "it was stopped, as by SIGSTOP"
        case psutil.STATUS_SLEEPING:
            since = pulse.silent_s - pulse.noticed_after_s
            is_idle = vitals.cpu_s - pulse.noticed.cpu_s < _IDLE * since
            hangs = pulse.silent_s >= _STUCK * silence_s and is_idle
            return "it hangs in native code, without using a processor" if hangs else None
        case _:
            return None  # it wants a processor or a disk and gets none, or somebody debugs it


def _vitals(pid: int, created: float) -> Vitals | None:
    try:
        process = psutil.Process(pid)
        if process.create_time() != created:
            return None
        times = process.cpu_times()
        return Vitals(process.status(), times.user + times.system)
    except psutil.NoSuchProcess:
        return None


def _kill(pid: int, created: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == created:
            process.kill()


def _on_node_of(card: Card, function: Callable[[int, float], T]) -> T | None:
    """``function(pid, created)``, called on the node of the process; None when that node does not answer either."""
    if card.node_id == ray.get_runtime_context().get_node_id():
        return function(card.pid, card.created)
    where = NodeAffinitySchedulingStrategy(card.node_id, soft=False)
    ref = ray.remote(function).options(num_cpus=0, scheduling_strategy=where).remote(card.pid, card.created)
    try:
        return cast("T", ray.get(ref, timeout=_REMOTE_TIMEOUT_S))
    except RayError as error:
        logger.warning("%s cannot be looked at: %s", card, error)
        return None
