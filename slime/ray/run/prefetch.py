"""Prefetch of rollouts: generation overlaps training, and weights never change inside a rollout.

who waits for whom
generator thread   a free slot (at most ``capacity`` rollouts are running or finished but not taken), and the engines
taker (driver)     the next rollout in order
engines_idle()     the rollout in flight. While it is held no rollout starts, so weights or an evaluation can go in

Called by ``train_async.py``. Knows neither trainer nor Ray: a function generates one rollout.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from slime.utils.async_utils import Deadline

T = TypeVar("T")

_SLICE_S = 1.0  # a wait checks for interrupts this often


class PrefetchedRollouts(Generic[T]):
    """Generates ``rollout_ids`` in order in a separate thread.

    Args:
        generate: generates one rollout and blocks until it is finished.
        rollout_ids: in the order they are trained on.
        capacity: rollouts that may be running or finished without having been taken (``--async-buffer-size``). With 0
            a rollout starts when it is taken, so nothing overlaps.
        timeout_s: longest wait for one rollout, and ``fix`` the flag that sets it.
    """

    def __init__(
        self,
        generate: Callable[[int], T],
        rollout_ids: Sequence[int],
        *,
        capacity: int,
        timeout_s: float,
        fix: str = "",
    ) -> None:
        self._generate = generate
        self._rollout_ids = rollout_ids
        self._timeout_s = timeout_s
        self._fix = fix
        self._finished: queue.Queue[T | BaseException] = queue.Queue()
        self._change = threading.Condition()  # guards the fields below
        self._free_slots = capacity
        self._starts_when_taken = capacity == 0
        self._is_generating = False
        self._num_idle_wanted = 0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetched rollouts", daemon=True)
        self._thread.start()

    def take(self, rollout_id: int) -> T:
        """Return the next rollout and free its slot. Raises the errors of the generation."""
        deadline = Deadline(self._timeout_s, f"rollout {rollout_id}", self._fix)
        if self._starts_when_taken:
            self._free_slot()
        while True:
            try:
                item = self._finished.get(timeout=min(_SLICE_S, deadline.remaining))
                break
            except queue.Empty:
                deadline.check()
        if isinstance(item, BaseException):
            raise item
        # Not when the rollout is finished: finished rollouts count against the capacity, which bounds their staleness.
        if not self._starts_when_taken:
            self._free_slot()
        return item

    def _free_slot(self) -> None:
        with self._change:
            self._free_slots += 1
            self._change.notify_all()

    @contextmanager
    def engines_idle(self) -> Iterator[None]:
        """Wait for the rollout in flight, and keep the next one from starting."""
        deadline = Deadline(self._timeout_s, "the rollout in flight to finish before the engines change", self._fix)
        with self._change:
            self._num_idle_wanted += 1  # stops the generator. A plain lock could starve this thread
        try:
            with self._change:
                while not self._change.wait_for(lambda: not self._is_generating, min(_SLICE_S, deadline.remaining)):
                    deadline.check()
            yield
        finally:
            with self._change:
                self._num_idle_wanted -= 1
                self._change.notify_all()

    def stop(self) -> None:
        """Start no further rollout. Does not wait for the one in flight, whose engines the owner stops."""
        with self._change:
            self._is_stopped = True
            self._change.notify_all()

    def _may_start(self) -> bool:
        return self._is_stopped or (self._free_slots > 0 and self._num_idle_wanted == 0)

    def _run(self) -> None:
        try:
            for rollout_id in self._rollout_ids:
                with self._change:
                    self._change.wait_for(self._may_start)  # ends with stop(), only take() has a deadline
                    if self._is_stopped:
                        return
                    self._free_slots -= 1
                    self._is_generating = True
                try:
                    self._finished.put(self._generate(rollout_id))
                finally:
                    with self._change:
                        self._is_generating = False
                        self._change.notify_all()
        except BaseException as error:  # take() raises it in the driver's thread
            self._finished.put(error)
