"""Weights for engines that restarted: while the driver waits for a rollout, and at every weight sync.

who waits for whom
driver    the rollout, in short slices. Between two slices it sends weights to the engines that wait for them
engine    its weights, before it registers at the router: no rollout sees the weights of the checkpoint
rollout   an engine, if all are dead: its requests are repeated until one serves

Without ``--use-fault-tolerance`` no engine restarts. Then the question which engines wait raises the cause of the first
death, while the rollout would still retry its requests to the dead engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from slime.backends import Canary, EngineFleet, Probe
from slime.ray.engines.fleet import RayEngineFleet, log_deaths, silent_engines
from slime.ray.engines.servers import RolloutServers
from slime.ray.train_actor import SyncReport
from slime.ray.watch import get
from slime.ray.watch.failure_report import message_of
from slime.utils.async_utils import Deadline
from slime.weight_sync.probe import verify_adapter, verify_canary

logger = logging.getLogger(__name__)

_SLICE_S = 0.5
_CALL_TIMEOUT_S = 120.0

P = ParamSpec("P")
T = TypeVar("T")


class RemoteEngines:
    """The engines of the rollout manager, called from the driver. Every call has a deadline.

    Args:
        manager: handle of the rollout manager.
        sync_timeout_s: of calls that move memory (``--weight-sync-timeout``).
    """

    def __init__(self, manager: Any, sync_timeout_s: float) -> None:
        self._manager = manager
        self._sync_timeout_s = sync_timeout_s

    def call(self, method: Callable[Concatenate[RolloutServers, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``method(servers, *args)`` in the manager: ``engines.call(RolloutServers.admit, names)``."""
        ref = self._manager.on_engines.remote(method, *args, **kwargs)
        answer: T = get(ref, _CALL_TIMEOUT_S, f"the rollout manager to answer {method.__name__}()")
        return answer

    def take_weights(self) -> bool:
        """Whether any engine receives weights."""
        return bool(self.call(RolloutServers.receivers).engines)

    def offload(self) -> None:
        self._move_memory(RolloutServers.offload, "engines to release their memory")

    def onload_weights(self) -> None:
        self._move_memory(RolloutServers.onload_weights, "engines to make room for weights")

    def onload_kv(self) -> None:
        self._move_memory(RolloutServers.onload_kv, "engines to take their memory back")

    def _move_memory(self, method: Callable[[RolloutServers], None], what: str) -> None:
        get(self._manager.on_engines.remote(method), self._sync_timeout_s, what, "--weight-sync-timeout")


class Recovery:
    """One per run.

    Args:
        send_now: sends weights to the waiting engines, given the number of those that serve. Returns False if they must
            wait for the next sync.
        start_timeout_s: longest wait for an engine if all are dead (``--engine-start-timeout``).
    """

    def __init__(
        self, engines: RemoteEngines, send_now: Callable[[RayEngineFleet, int], bool], start_timeout_s: float
    ) -> None:
        self._engines = engines
        self._send_now = send_now
        self._start_timeout_s = start_timeout_s
        self._canary: Canary | None = None
        self._probed: Probe | None = None

    def get(self, ref: Any, seconds: float, what: str, fix: str) -> Any:
        """:func:`slime.ray.watch.get` for calls that use engines. Engines that restart meanwhile get their weights."""
        return get(ref, seconds, what, fix, meanwhile=self._serve_waiting, slice_s=_SLICE_S)

    def sync(self, update: Callable[[RayEngineFleet], T]) -> T:
        """Call ``update`` with all living engines. If engines die during the call, repeat it with the others."""
        while True:
            fleet = self._fleet_to_sync()
            reports: list[T] = []
            with self.tolerating_deaths(fleet, "a weight sync"):
                reports.append(update(fleet))
            if reports:
                self._engines.call(RolloutServers.end_sync, fleet.names)
                return reports[0]

    def verify(self, fleet: EngineFleet, report: SyncReport, timeout_s: float) -> None:
        """Raise an EngineError unless every engine of ``fleet``, which serves, computes with the sync of ``report``."""
        if report.canary is not None:
            verify_canary(fleet, report.canary, timeout_s, self._canary)
        if report.proof is not None:
            verify_adapter(fleet, report.proof, timeout_s, self._probed)
            self._probed = report.proof.probe

    def verify_sync(self, fleet: RayEngineFleet, report: SyncReport, timeout_s: float) -> None:
        """:meth:`verify` after a sync with all living engines. Those that die meanwhile are replaced."""
        with self.tolerating_deaths(fleet, "the proof of the sync"):
            self.verify(fleet, report, timeout_s)
        self._canary = report.canary

    @contextmanager
    def tolerating_deaths(self, fleet: RayEngineFleet, during: str) -> Iterator[None]:
        """Only log an error of the block if engines of ``fleet`` have died: they will be replaced."""
        try:
            yield
        except Exception as error:  # an error of any kind may be the consequence of a death
            lost = self._lost(fleet, error)
            if not lost:
                raise
            log_deaths(lost, during, error)

    def _serve_waiting(self) -> None:
        waiting = self._engines.call(RolloutServers.waiting)
        if not waiting.fleet.names:
            return
        try:
            is_sent = self._send_now(waiting.fleet, waiting.num_serving)
        except Exception as error:  # as in tolerating_deaths
            if not self._lost(waiting.fleet, error):
                raise
            logger.warning("an engine died again before it had its weights: %s", message_of(error) or error)
            return
        if is_sent:  # only now: an engine with the checkpoint's weights must not get requests
            self._engines.call(RolloutServers.admit, waiting.fleet.names)

    def _fleet_to_sync(self) -> RayEngineFleet:
        what = "an engine to take weights: all are dead, and none has started again"
        deadline = Deadline(self._start_timeout_s + _CALL_TIMEOUT_S, what, "--engine-start-timeout")
        while True:
            fleet = self._engines.call(RolloutServers.begin_sync)
            if fleet.engines:
                return fleet
            deadline.check()
            time.sleep(_SLICE_S)

    def _lost(self, fleet: RayEngineFleet, error: Exception) -> list[str]:
        """Names of the engines of ``fleet`` that are dead or silent after an update ended with ``error``."""
        if silent := silent_engines(error, fleet):
            self._engines.call(RolloutServers.mark_dead, silent)
        return self._engines.call(RolloutServers.lost, fleet.names)
