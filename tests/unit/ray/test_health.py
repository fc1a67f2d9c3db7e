"""Which engine counts as dead, and when, derived from the results of the checks, second by second."""

from __future__ import annotations

import threading

import pytest

from slime.ray.engines.health import HealthMonitor


class Engines:
    """Two engines, a clock, and the deaths that the monitor reports."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended: set[int] = set()
        self.answers: dict[int, bool | None] = {0: True, 1: True}
        self.asked: list[tuple[int, float]] = []
        self.dead: list[tuple[int, str]] = []

    def find_ended(self) -> dict[int, bool]:
        dead = {rank for rank, _ in self.dead}
        return {rank: rank in self.ended for rank in (0, 1) if rank not in dead}

    def ask(self, rank: int):
        self.asked.append((rank, self.now))
        return lambda: self.answers[rank]

    def on_dead(self, rank: int, reason: str) -> None:
        self.dead.append((rank, reason))

    def monitor(self, **settings) -> HealthMonitor:
        return HealthMonitor(
            self.find_ended, self.ask, self.on_dead, clock=lambda: self.now, **({"interval_s": 10.0} | settings)
        )

    def looks(self, monitor: HealthMonitor, seconds: int) -> None:
        """One look a second."""
        for _ in range(seconds):
            monitor.look()
            self.now += 1.0


@pytest.fixture
def engines() -> Engines:
    return Engines()


def test_an_engine_whose_process_ended_is_dead_at_the_next_look(engines):
    monitor = engines.monitor(first_wait_s=1000.0)
    engines.looks(monitor, 3)
    assert engines.dead == []
    engines.ended.add(1)
    engines.looks(monitor, 3)
    assert engines.dead == [(1, "its process ended")]


def test_engines_that_answer_are_asked_once_per_interval_and_live(engines):
    engines.looks(engines.monitor(), 34)
    assert engines.dead == []
    times = [when for rank, when in engines.asked if rank == 0]
    assert times == [100.0, 111.0, 122.0, 133.0]  # the answer is seen one look later, and the interval begins then


def test_the_third_question_in_a_row_without_an_answer_is_the_last(engines):
    engines.answers[0] = False
    monitor = engines.monitor()
    engines.looks(monitor, 23)
    assert engines.dead == []
    engines.looks(monitor, 1)
    assert engines.dead == [(0, "it left 3 health checks in a row unanswered")]


def test_engines_that_fall_silent_together_get_twice_the_time_it_may_be_the_network(engines):
    monitor = engines.monitor(interval_s=0.0)
    engines.answers = {0: False, 1: False}
    engines.looks(monitor, 11)  # a question is asked at one look, and judged at the next
    assert engines.dead == []
    engines.looks(monitor, 1)
    assert [rank for rank, _ in engines.dead] == [0, 1]
    assert engines.dead[0][1] == "it left 6 health checks in a row unanswered"


def test_the_one_that_stays_silent_when_the_others_answer_again_is_dead_at_once(engines):
    monitor = engines.monitor(interval_s=0.0)
    engines.answers = {0: False, 1: False}
    engines.looks(monitor, 8)
    engines.answers[0] = True
    engines.looks(monitor, 2)
    assert [rank for rank, _ in engines.dead] == [1]


def test_an_answer_in_between_makes_good_what_was_missed_before(engines):
    monitor = engines.monitor(interval_s=0.0)
    for answer in (False, False, True, False, False, True):
        engines.answers[0] = answer
        engines.looks(monitor, 2)
    assert engines.dead == []


def test_a_slow_answer_is_waited_for_and_keeps_nobody_from_noticing_another_death(engines):
    engines.answers[0] = None
    monitor = engines.monitor()
    engines.looks(monitor, 5)
    engines.ended.add(1)
    engines.looks(monitor, 1)
    assert engines.dead == [(1, "its process ended")]
    assert [rank for rank, _ in engines.asked].count(0) == 1


def test_the_wait_for_the_first_batches_comes_once_and_a_later_sync_has_another_one(engines):
    monitor = engines.monitor(first_wait_s=300.0, later_wait_s=5.0, interval_s=1.0)
    monitor.pause()
    engines.now += 1000.0  # the trainer loads: the engines have not compiled anything yet
    monitor.resume()
    begun = engines.now
    engines.looks(monitor, 302)
    assert engines.asked == [(0, begun + 300.0), (1, begun + 300.0)]
    monitor.pause()
    engines.asked.clear()
    monitor.renew(1)  # another engine, which compiles as well
    monitor.resume()
    begun = engines.now
    engines.looks(monitor, 310)
    first = {rank: next(when for asked, when in engines.asked if asked == rank) for rank in (0, 1)}
    assert first == {0: begun + 5.0, 1: begun + 300.0}


@pytest.mark.parametrize("begin", ["start", "resume", "renew"])
def test_the_first_wait_comes_before_the_first_question(begin, engines):
    monitor = engines.monitor(first_wait_s=5.0)
    if begin != "start":
        engines.looks(monitor, 20)
        engines.asked.clear()
        monitor.resume() if begin == "resume" else monitor.renew(0)
    began = engines.now
    engines.looks(monitor, 30)
    assert next(when for rank, when in engines.asked if rank == 0) == began + 5.0


def test_nobody_is_asked_or_judged_while_paused(engines):
    engines.answers = {0: False, 1: False}
    monitor = engines.monitor(interval_s=0.0)
    engines.looks(monitor, 5)  # two strikes, a third question is open
    monitor.pause()
    asked = len(engines.asked)
    engines.looks(monitor, 20)
    assert (len(engines.asked), engines.dead) == (asked, [])
    monitor.resume()
    engines.looks(monitor, 4)
    assert engines.dead == [], "strikes from before a pause are forgotten"
    engines.looks(monitor, 8)
    assert sorted(rank for rank, _ in engines.dead) == [0, 1]


def test_a_look_that_is_asked_for_finds_ended_processes_while_paused_too(engines):
    monitor = engines.monitor()
    monitor.pause()
    engines.ended.add(0)
    monitor.look()
    assert engines.dead == [(0, "its process ended")]


def test_the_thread_looks_by_itself_survives_a_failed_look_and_reports_nothing_after_stop(engines):
    reported, failed = threading.Event(), threading.Event()

    def find_ended() -> dict[int, bool]:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a look that fails")
        return {0: True}

    def on_dead(rank: int, reason: str) -> None:
        engines.on_dead(rank, reason)
        reported.set()

    monitor = HealthMonitor(find_ended, engines.ask, on_dead, interval_s=1.0)
    monitor.start()
    assert reported.wait(120)
    monitor.stop()
    count = len(engines.dead)
    monitor.look()
    assert len(engines.dead) == count
