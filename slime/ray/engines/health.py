"""Health checks of engines: ended processes count as dead at once, silent engines after several failed checks.

    every second      has its process ended?                 yes -> dead
    every interval    does it answer a request in time?      no  -> a strike, three in a row -> dead
                      most of them silent at once            six in a row: it may be the network, or this process

Runs in a thread of the rollout manager. Knows neither Ray nor engines. Paused during a weight sync, because an engine
that is busy with new weights does not answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from slime.utils.errors import reported

logger = logging.getLogger(__name__)

# Polls a health check: True if the engine answered, False if it did not answer in time, None while it may answer.
Answer = Callable[[], bool | None]

_LOOK_EVERY_S = 1.0
_STRIKES = 3
_STOP_TIMEOUT_S = 5.0


class HealthMonitor:
    """Calls ``on_dead(rank, reason)`` once per death, from its own thread or from :meth:`look`.

    Args:
        find_ended: rank -> whether its process has ended, for all engines that should serve. Returns within seconds.
        ask: sends a request to the engine ``rank`` and returns at once.
        interval_s: seconds between an answer and the next request to an engine.
        first_wait_s: seconds without requests after :meth:`start`, after the first :meth:`resume`, and to a new
            engine. Requests come with the first resume: before it, engines wait for their first weights.
        later_wait_s: seconds without requests after further calls of :meth:`resume`. None: ``first_wait_s``.
        strikes: unanswered requests in a row after which an engine counts as dead. Twice as many while more than
            half of several engines are silent.
    """

    def __init__(
        self,
        find_ended: Callable[[], Mapping[int, bool]],
        ask: Callable[[int], Answer],
        on_dead: Callable[[int, str], None],
        *,
        interval_s: float,
        first_wait_s: float = 0.0,
        later_wait_s: float | None = None,
        strikes: int = _STRIKES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_ended = find_ended
        self._ask = ask
        self._on_dead = on_dead
        self._interval_s = interval_s
        self._first_wait_s = first_wait_s
        self._later_wait_s = first_wait_s if later_wait_s is None else later_wait_s
        self._has_resumed = False
        self._limit = strikes
        self._clock = clock
        self._guard = threading.RLock()  # one look at a time. Guards the fields below
        self._open: dict[int, Answer] = {}
        self._strikes: dict[int, int] = {}
        self._ask_at: dict[int, float] = {}
        self._new_until: dict[int, float] = {}
        self._quiet_until = clock() + first_wait_s
        self._is_paused = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        """Send no requests until :meth:`resume`, and forget the open ones."""
        with self._guard:
            self._is_paused = True
            self._open.clear()  # an answer that comes after the pause would be late without fault of the engine

    def resume(self) -> None:
        """Check again. The first wait begins anew, and all strikes are forgotten."""
        with self._guard:
            self._strikes.clear()
            self._ask_at.clear()
            self._quiet_until = self._clock() + (self._later_wait_s if self._has_resumed else self._first_wait_s)
            self._has_resumed, self._is_paused = True, False

    def renew(self, rank: int) -> None:
        """Forget the state of ``rank``: another engine has replaced it."""
        with self._guard:
            self._open.pop(rank, None)
            self._strikes.pop(rank, None)
            self._ask_at.pop(rank, None)
            self._new_until[rank] = self._clock() + self._first_wait_s

    def stop(self) -> None:
        """Stop the thread. ``on_dead`` is not called afterwards."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def look(self) -> None:
        """Check every engine once. While paused only ended processes are found."""
        with self._guard:
            looks = self._find_ended()
            for rank, has_ended in looks.items():
                if has_ended:
                    self._report_dead(rank, "its process ended")
                elif not self._is_paused:
                    self._check(rank)
            self._report_silent(len(looks))

    def _check(self, rank: int) -> None:
        now = self._clock()
        if rank not in self._open:
            if now >= max(self._quiet_until, self._ask_at.get(rank, 0.0), self._new_until.get(rank, 0.0)):
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
        # A common cause, such as the network or this process, is more likely than simultaneous deaths.
        is_common = len(silent) > 1 and 2 * len(silent) > num_watched
        for rank, strikes in silent.items():
            if not is_common or strikes >= 2 * self._limit:
                self._report_dead(rank, f"it left {strikes} health checks in a row unanswered")

    def _report_dead(self, rank: int, reason: str) -> None:
        if self._stopped.is_set():
            return
        self._open.pop(rank, None)
        self._strikes.pop(rank, None)  # otherwise the next look would report the same death again
        self._on_dead(rank, reason)

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            if self._is_paused:  # the owner calls look() itself if a call to paused engines fails
                continue
            # one failed look must not end the thread that watches
            with reported(lambda _: logger.exception("a look at the engines failed")):
                self.look()
