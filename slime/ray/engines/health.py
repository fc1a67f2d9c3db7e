"""Watches engines, and says which of them are dead: who died at once, who stopped answering after a few strikes.

    every second      has its process ended?                 yes -> dead
    every interval    does it answer a request in time?      no  -> a strike; three in a row -> dead
                      most of them silent at once            six in a row: it may be the network, or this process

A thread of the rollout manager. Knows neither Ray nor engines: it is handed functions that look at them, and one that
is told about the dead. Paused while weights are sent: an engine that is busy taking them is not a dead one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines, silent_engines
from slime.ray.train_actor import SyncReport
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.waiting import get
from slime.utils.deadline import Deadline

logger = logging.getLogger(__name__)

Answer = Callable[[], bool | None]
"""Polled for the answer to a question that was asked: True it came, False it did not come in time, None not yet."""

_LOOK_EVERY_S = 1.0
_STRIKES = 3
_STOP_TIMEOUT_S = 5.0


class HealthMonitor:
    """Calls ``on_dead(rank, reason)`` once per death, from its own thread or from :meth:`look`.

    Args:
        find_ended: which of the engines that should serve have ended, by rank; returns within seconds.
        ask: sends a request to the engine ``rank`` and returns at once.
        interval_s: seconds between an answer and the next question to an engine.
        first_wait_s: seconds without questions after :meth:`start`, after :meth:`resume`, and to a new engine.
        strikes: questions in a row that an engine leaves unanswered before it counts as dead; twice as many while more
            than half of several engines are silent.
    """

    def __init__(
        self,
        find_ended: Callable[[], Mapping[int, bool]],
        ask: Callable[[int], Answer],
        on_dead: Callable[[int, str], None],
        *,
        interval_s: float,
        first_wait_s: float = 0.0,
        strikes: int = _STRIKES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_ended = find_ended
        self._ask = ask
        self._on_dead = on_dead
        self._interval_s = interval_s
        self._first_wait_s = first_wait_s
        self._limit = strikes
        self._clock = clock
        self._guard = threading.RLock()  # one look at a time; guards the four fields below
        self._open: dict[int, Answer] = {}
        self._strikes: dict[int, int] = {}
        self._ask_at: dict[int, float] = {}
        self._quiet_until = clock() + first_wait_s
        self._is_paused = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        """No look from now on, and open questions are forgotten."""
        with self._guard:
            self._is_paused = True
            self._open.clear()

    def resume(self) -> None:
        """Look again; the first wait begins anew, and all strikes are forgotten."""
        with self._guard:
            self._strikes.clear()
            self._ask_at.clear()
            self._quiet_until = self._clock() + self._first_wait_s
            self._is_paused = False

    def renew(self, rank: int) -> None:
        """Another engine has taken the place ``rank``."""
        with self._guard:
            self._open.pop(rank, None)
            self._strikes.pop(rank, None)
            self._ask_at[rank] = self._clock() + self._first_wait_s

    def stop(self) -> None:
        """``on_dead`` is not called any more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def look(self) -> None:
        """Look at every engine once, also while paused: then only for ended processes."""
        with self._guard:
            looks = self._find_ended()
            for rank, has_ended in looks.items():
                if has_ended:
                    self._clean_up(rank, "its process ended")
                elif not self._is_paused:
                    self._question(rank)
            self._report_silent(len(looks))

    def _question(self, rank: int) -> None:
        now = self._clock()
        if rank not in self._open:
            if now >= max(self._quiet_until, self._ask_at.get(rank, 0.0)):
                self._open[rank] = self._ask(rank)
            return
        answer = self._open[rank]()
        if answer is None:
            return
        del self._open[rank]
        self._ask_at[rank] = now + self._interval_s
        if answer:
            self._strikes.pop(rank, None)
            return
        self._strikes[rank] = self._strikes.get(rank, 0) + 1
        logger.warning("engine %d does not answer (%d of %d)", rank, self._strikes[rank], self._limit)

    def _report_silent(self, num_watched: int) -> None:
        silent = {rank: strikes for rank, strikes in self._strikes.items() if strikes >= self._limit}
        is_common = len(silent) > 1 and 2 * len(silent) > num_watched
        for rank, strikes in silent.items():
            if not is_common or strikes >= 2 * self._limit:
                self._clean_up(rank, f"it left {strikes} health checks in a row unanswered")

    def _clean_up(self, rank: int, reason: str) -> None:
        if self._stopped.is_set():
            return
        self._open.pop(rank, None)
        self._strikes.pop(rank, None)
        self._on_dead(rank, reason)

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            if self._is_paused:
                continue
            try:
                self.look()
            except Exception:  # the watch must outlive whatever one look ran into
                logger.exception("a look at the engines failed")


# Gives engines that were started again their weights, while the driver waits for a rollout and at every weight sync.
#
# who waits for whom
# driver    the rollout, in short slices; between two of them the engines that wait for weights, if there are any
# engine    weights, before the router knows it: a rollout never sees the weights of the checkpoint
# rollout   an engine, when all of them died: its requests are tried again until one serves
#
# Without ``--use-fault-tolerance`` no engine is started again: the question who needs weights raises the cause of the
# first death, while the rollout would still try for a while to reach the dead.
#
# Used by the loop. Knows no trainer: it is handed a function that sends weights. Of the rollout manager it uses
# ``waiting_engines``, ``admit_engines``, ``begin_sync``, ``end_sync``, ``mark_engines_dead`` and ``lost_engines``.


_SLICE_S = 0.5
_CALL_TIMEOUT_S = 120.0


class Recovery:
    """One per run.

    Args:
        manager: handle of the rollout manager.
        send_now: sends the weights that serve to the engines that wait, unless it is better to leave them until the
            next sync; says whether it did.
        start_timeout_s: longest wait for an engine when all are dead (``--engine-start-timeout``).
    """

    def __init__(self, manager: Any, send_now: Callable[[WaitingEngines], bool], start_timeout_s: float) -> None:
        self._manager = manager
        self._send_now = send_now
        self._start_timeout_s = start_timeout_s

    def get(self, ref: Any, seconds: float, what: str, fix: str) -> Any:
        """``waiting.get`` for calls in which engines work: those that die meanwhile are made good."""
        return get(ref, seconds, what, fix, meanwhile=self._look_after_engines, slice_s=_SLICE_S)

    def sync(self, update: Callable[[RayEngineFleet], SyncReport]) -> SyncReport:
        """Send weights to all engines that live; when one dies of it, again to the others."""
        while True:
            fleet = self._fleet_to_sync()
            try:
                report = update(fleet)
            except Exception as error:
                lost = self._lost(fleet, error)
                if not lost:
                    raise
                dead = ", ".join(name.partition(".")[0] for name in lost)
                logger.warning("engine %s died during a weight sync: %s", dead, message_of(error) or error)
            else:
                self._ask("end_sync", fleet.names)
                return report

    def _look_after_engines(self) -> None:
        waiting: WaitingEngines = self._ask("waiting_engines")
        names = waiting.fleet.names
        if not names:
            return
        try:
            is_sent = self._send_now(waiting)
        except Exception as error:
            if not self._lost(waiting.fleet, error):
                raise
            logger.warning("an engine died again before it had its weights: %s", message_of(error) or error)
            return
        if is_sent:
            self._ask("admit_engines", names)

    def _fleet_to_sync(self) -> RayEngineFleet:
        what = "an engine to take weights: all are dead, and none has started again"
        deadline = Deadline(self._start_timeout_s + _CALL_TIMEOUT_S, what, "--engine-start-timeout")
        while True:
            fleet: RayEngineFleet = self._ask("begin_sync")
            if fleet.engines:
                return fleet
            deadline.check()
            time.sleep(_SLICE_S)

    def _lost(self, fleet: RayEngineFleet, error: Exception) -> list[str]:
        """Names of the engines of ``fleet`` that an update which ended with ``error`` has cost: dead, or silent."""
        if silent := silent_engines(error, fleet):
            self._ask("mark_engines_dead", silent)
        lost: list[str] = self._ask("lost_engines", fleet.names)
        return lost

    def _ask(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self._manager, method).remote(*arguments)
        return get(ref, _CALL_TIMEOUT_S, f"the rollout manager to answer {method}()")
