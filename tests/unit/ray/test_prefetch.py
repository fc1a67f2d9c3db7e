"""Rollouts ahead of the trainer: never more than asked for, in order, and none across a change of weights."""

from __future__ import annotations

import threading

import pytest

from slime.ray.run.prefetch import PrefetchedRollouts
from slime.utils.errors import DeadlineExceeded

LIMIT_S = 10.0


class Engines:
    """Generates a rollout when told to, and knows which rollouts were started."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.weights = 0
        self._may_finish = threading.Semaphore(0)
        self._news = threading.Condition()

    def generate(self, rollout_id: int) -> tuple[int, int, int]:
        with self._news:
            self.started.append(rollout_id)
            self._news.notify_all()
        before = self.weights
        assert self._may_finish.acquire(timeout=LIMIT_S)
        return rollout_id, before, self.weights

    def finish_one(self) -> None:
        self._may_finish.release()

    def wait_started(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.started) >= count, timeout=LIMIT_S)


def prefetched(engines: Engines, *, capacity: int, number: int = 5) -> PrefetchedRollouts[tuple[int, int, int]]:
    return PrefetchedRollouts(engines.generate, range(number), capacity=capacity, timeout_s=LIMIT_S)


@pytest.mark.parametrize("capacity", [1, 3])
def test_no_more_rollouts_are_started_than_there_are_places(capacity: int):
    engines = Engines()
    rollouts = prefetched(engines, capacity=capacity)
    for _ in range(capacity):
        engines.finish_one()
    engines.wait_started(capacity)
    with rollouts.engines_idle():
        assert engines.started == list(range(capacity))  # the next one waits for a place, not for time
    assert rollouts.take(0)[0] == 0
    engines.wait_started(capacity + 1)
    rollouts.stop()
    engines.finish_one()


def test_rollouts_are_taken_in_order_while_the_next_one_runs():
    engines = Engines()
    rollouts = prefetched(engines, capacity=1)
    for rollout_id in range(5):
        engines.wait_started(rollout_id + 1)
        engines.finish_one()
        assert rollouts.take(rollout_id)[0] == rollout_id


def test_weights_change_between_two_rollouts_only():
    engines = Engines()
    rollouts = prefetched(engines, capacity=2)
    engines.wait_started(1)
    threading.Timer(0.05, engines.finish_one).start()
    with rollouts.engines_idle():  # waits for rollout 0
        engines.weights = 1
    engines.finish_one()
    assert [rollouts.take(0), rollouts.take(1)] == [(0, 0, 0), (1, 1, 1)]
    rollouts.stop()
    engines.finish_one()


def test_an_error_of_the_generation_reaches_the_taker():
    def broken(rollout_id: int) -> None:
        raise RuntimeError(f"rollout {rollout_id} broke")

    rollouts = PrefetchedRollouts(broken, range(3), capacity=1, timeout_s=LIMIT_S)
    with pytest.raises(RuntimeError, match="rollout 0 broke"):
        rollouts.take(0)


def test_waiting_for_a_rollout_has_a_deadline_that_names_it():
    engines = Engines()
    rollouts = PrefetchedRollouts(engines.generate, range(3), capacity=1, timeout_s=0.1, fix="--rollout-timeout")
    with pytest.raises(DeadlineExceeded, match=r"waiting for rollout 0.*--rollout-timeout"):
        rollouts.take(0)
    with pytest.raises(DeadlineExceeded, match="rollout in flight to finish"), rollouts.engines_idle():
        pass
    rollouts.stop()
    engines.finish_one()


def test_after_a_stop_no_rollout_is_started():
    engines = Engines()
    rollouts = prefetched(engines, capacity=1)
    engines.wait_started(1)
    rollouts.stop()
    engines.finish_one()
    rollouts.take(0)
    rollouts._thread.join(LIMIT_S)
    assert engines.started == [0]


def test_without_places_a_rollout_starts_when_it_is_taken():
    engines = Engines()
    rollouts = prefetched(engines, capacity=0)
    for rollout_id in range(3):
        assert engines.started == list(range(rollout_id))
        engines.weights = rollout_id
        engines.finish_one()
        assert rollouts.take(rollout_id) == (rollout_id, rollout_id, rollout_id)
    rollouts.stop()
