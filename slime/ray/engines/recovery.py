"""Gives engines that were started again their weights, while the driver waits for a rollout and at every weight sync.

who waits for whom
driver    the rollout, in short slices; between two of them the engines that wait for weights, if there are any
engine    weights, before the router knows it: a rollout never sees the weights of the checkpoint
rollout   an engine, when all of them died: its requests are tried again until one serves

Without ``--use-fault-tolerance`` no engine is started again: the question who needs weights raises the cause of the
first death, while the rollout would still try for a while to reach the dead.

Used by the loop. Knows no trainer: it is handed a function that sends weights. Of the rollout manager it uses
``waiting_engines``, ``admit_engines``, ``begin_sync``, ``end_sync``, ``condemn_engines`` and ``lost_engines``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines, silent_engines
from slime.ray.train_actor import SyncReport
from slime.ray.watch.failure_report import message_of
from slime.ray.watch.waiting import get
from slime.utils.deadline import Deadline

__all__ = ["Recovery"]

logger = logging.getLogger(__name__)

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
            self._ask("condemn_engines", silent)
        lost: list[str] = self._ask("lost_engines", fleet.names)
        return lost

    def _ask(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self._manager, method).remote(*arguments)
        return get(ref, _CALL_TIMEOUT_S, f"the rollout manager to answer {method}()")
