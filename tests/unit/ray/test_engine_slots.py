"""Dead engines are replaced in their places, serve only once they have weights, and are given up in the end.

The actors are fakes: a call runs when its result is awaited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from slime.backends import EngineInfo
from slime.ray.engines import slot as engine_slot
from slime.ray.engines import slots as engine_slots
from slime.ray.engines.slot import WatchSettings
from slime.ray.engines.slots import EngineSlots
from slime.utils.errors import EngineError
from tests.limits import unloaded_time

ROUTER = "http://router:1"
URL = "http://engine:{}"
SETTINGS = WatchSettings(interval_s=1.0, timeout_s=1.0, first_wait_s=1000.0, start_timeout_s=5.0)


class Method:
    def __init__(self, function):
        self.remote = lambda *arguments: lambda: function(*arguments)


class Actor:
    """An engine's actor: its url comes back with the next engine, as a free port does."""

    def __init__(self, world: World, rank: int, num_before: int) -> None:
        self.world, self.rank, self.num_before = world, rank, num_before
        self.is_dead = self.has_notice = False
        self.requests = 0
        names = ("start_and_register", "start_unregistered", "register", "has_ended", "stop", "raise_if_dead")
        names += ("is_responsive", "is_leaving", "abort_all", "num_requests")
        for name in names:
            setattr(self, name, Method(getattr(self, f"_{name}")))

    def _start_unregistered(self) -> EngineInfo:
        if self.rank in self.world.broken:
            raise EngineError(f"engine {self.rank}: no such device")
        return EngineInfo(URL.format(self.rank), 1)

    def _start_and_register(self, router: str) -> EngineInfo:
        info = self._start_unregistered()
        self._register(router)
        return info

    def _register(self, router: str) -> None:
        if not self.world.router_answers.is_set():
            self.world.is_registering.set()
        assert self.world.router_answers.wait(120)
        if self.is_dead:
            raise EngineError("connection refused")
        if self.world.refusals:
            self.world.refusals -= 1
            raise EngineError("the router is busy")
        self.world.registered.add((self.rank, self.num_before))

    def _has_ended(self) -> bool:
        return self.is_dead

    def _is_responsive(self, timeout_s: float) -> bool:
        return not self.world.is_silent

    def _is_leaving(self) -> bool:
        return self.has_notice

    def _abort_all(self) -> None:
        if self.is_dead:
            raise EngineError("connection refused")
        self.world.aborted.append((self.rank, (self.rank, self.num_before) in self.world.registered))
        self.requests = max(0, self.requests - 1)

    def _num_requests(self) -> int:
        return self.requests

    def _raise_if_dead(self) -> None:
        if self.is_dead:
            raise EngineError(f"engine {self.rank} died with status -9. Last lines of its log: out of memory")

    def _stop(self) -> None:
        self.is_dead = True


class World:
    """Everything outside the slots: actors, and the router's list of (rank, how many died there before)."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.registered: set[tuple[int, int]] = set()
        self.aborted: list[tuple[int, bool]] = []  # (rank, whether the router still sent requests there)
        self.refusals = 0
        self.is_silent = False
        self.router_answers = threading.Event()
        self.router_answers.set()
        self.is_registering = threading.Event()
        self.broken: set[int] = set()
        self.killed: list[Actor] = []
        self.made = threading.Condition()

    def make(self, rank: int, num_before: int) -> Actor:
        with self.made:
            self.actors.append(Actor(self, rank, num_before))
            self.made.notify_all()
        return self.actors[-1]

    def remove_worker(self, router: str, url: str) -> None:
        assert router == ROUTER
        self.registered = {item for item in self.registered if URL.format(item[0]) != url}

    def registered_workers(self, router: str) -> list[str]:
        return [URL.format(rank) for rank, _ in self.registered]

    def latest(self, rank: int) -> Actor:
        return [actor for actor in self.actors if actor.rank == rank][-1]


@pytest.fixture
def world(monkeypatch) -> World:
    world = World()

    def get(calls, seconds, what, fix=""):
        return [call() for call in calls] if isinstance(calls, list) else calls()

    monkeypatch.setattr(engine_slots, "get", get)
    monkeypatch.setattr(engine_slots, "remove_worker", world.remove_worker)
    for name, value in (("get", get), ("remove_worker", world.remove_worker)):
        monkeypatch.setattr(engine_slot, name, value)
    monkeypatch.setattr(engine_slot, "registered_workers", world.registered_workers)
    monkeypatch.setattr(engine_slot, "_REPEAT_S", 0.001)
    monkeypatch.setattr(engine_slots.ray, "wait", lambda calls, num_returns=1, timeout=None: (calls, []))
    monkeypatch.setattr(engine_slots.ray, "get", lambda call: call())
    monkeypatch.setattr(engine_slots.ray, "kill", world.killed.append)
    monkeypatch.setattr(engine_slots, "_PAUSES_S", (0.0, 0.0, 0.0))
    return world


@pytest.fixture
def slots(world):
    slots = EngineSlots(world.make, range(2), ROUTER)
    slots.wait_ready(1.0)
    slots.watch(SETTINGS)
    slots._monitor.stop()  # the tests look themselves
    slots._monitor._stopped.clear()
    yield slots
    slots.stop(leaves_router=False)


def until(condition) -> None:
    deadline = unloaded_time() + 10.0
    while not condition():
        assert unloaded_time() < deadline
        time.sleep(0.005)


def kill(world: World, slots: EngineSlots, rank: int) -> list[str]:
    """Kill the engine and wait until this is noticed. Returns which of the engines are lost."""
    world.latest(rank).is_dead = True
    return look(slots, slots.fleet().names)


def look(slots: EngineSlots, names: Sequence[str]) -> list[str]:
    slots.look()
    alive = slots.fleet().names
    return [name for name in names if name not in alive]


def test_all_engines_serve_after_the_start(world, slots):
    assert slots.fleet().names == ("0.0", "1.0")
    assert world.registered == {(0, 0), (1, 0)}
    assert slots.waiting().num_serving == 2


def test_an_engine_that_comes_later_serves_beside_the_others_and_is_watched(world, slots):
    kill(world, slots, 1)
    until(lambda: slots.waiting().fleet.names)
    slots.start([2])
    slots.wait_ready(1.0)
    assert slots.fleet().names == ("0.0", "1.1", "2.0")
    assert slots.waiting().num_serving == 2, "the replaced one waits for weights as before"
    assert kill(world, slots, 2) == ["2.0"]


def test_a_dead_engine_leaves_the_router_and_another_waits_in_its_place_without_serving(world, slots):
    assert kill(world, slots, 1) == ["1.0"]
    until(lambda: slots.waiting().fleet.names)
    assert slots.waiting().fleet.names == ("1.1",)
    assert slots.waiting().num_serving == 1
    assert slots.fleet().names == ("0.0", "1.1"), "the next sync includes it"
    assert world.registered == {(0, 0)}, "it has the weights of the checkpoint"
    assert [(actor.rank, actor.num_before) for actor in world.killed] == [(1, 0)]


def test_an_engine_that_was_given_weights_serves(world, slots):
    kill(world, slots, 1)
    until(lambda: slots.waiting().fleet.names)
    slots.admit(["1.1"])
    assert world.registered == {(0, 0), (1, 1)}
    assert slots.waiting().num_serving == 2
    assert slots.waiting().fleet.names == ()


def test_an_engine_that_came_after_the_sync_had_begun_is_not_admitted_by_its_end(world, slots):
    slots.pause_watch()
    names = slots.fleet().names
    assert kill(world, slots, 0) == ["0.0"]
    until(lambda: slots.waiting().fleet.names)
    assert slots.waiting().fleet.engines[0].url == URL.format(0), "the address is the same, the engine is not"
    assert look(slots, names) == ["0.0"]
    slots.admit(names)
    assert world.registered == {(1, 0)}


def test_an_engine_that_dies_while_it_waits_is_replaced_like_any_other(world, slots):
    kill(world, slots, 1)
    until(lambda: slots.waiting().fleet.names)
    kill(world, slots, 1)
    until(lambda: slots.waiting().fleet.names == ("1.2",))
    world.latest(1).is_dead = True
    slots.admit(["1.2"])  # registers too late
    assert slots.waiting().num_serving == 1
    assert (1, 2) not in world.registered


def test_the_fourth_death_in_one_place_ends_the_run_with_its_last_words(world, slots):
    for deaths in (1, 2, 3):
        kill(world, slots, 1)
        until(lambda name=f"1.{deaths}": slots.waiting().fleet.names == (name,))
    kill(world, slots, 1)
    until(lambda: slots._failure is not None)
    with pytest.raises(EngineError, match=r"engine 1 died 4 times .* more than the 3 .* out of memory"):
        slots.waiting()
    with pytest.raises(EngineError, match="engine 1 died 4 times"):
        slots.raise_if_dead()


def test_an_engine_that_does_not_start_again_is_tried_again_and_then_given_up(world, slots):
    world.broken.add(0)
    kill(world, slots, 0)
    until(lambda: slots._failure is not None)
    assert [actor.num_before for actor in world.actors if actor.rank == 0] == [0, 1, 2, 3]
    with pytest.raises(EngineError, match=r"(?s)engine 0 died 4 times.*could not be started again.*no such device"):
        slots.waiting()


def test_after_the_end_nobody_is_replaced(world, slots):
    slots.stop(leaves_router=False)
    slots._on_dead(1, "its process ended")
    assert len(world.actors) == 2
    assert set(world.killed) == set(world.actors)


def test_an_engine_whose_weights_never_change_serves_as_soon_as_it_has_started_again(world):
    slots = EngineSlots(world.make, [4], ROUTER, needs_weights=False)
    slots.wait_ready(1.0)
    slots.watch(SETTINGS)
    try:
        assert kill(world, slots, 4) == ["4.0"]
        until(lambda: slots.waiting().num_serving)
        assert world.registered == {(4, 1)}
        assert slots.waiting().fleet.names == ()
    finally:
        slots.stop(leaves_router=False)


def test_an_engine_whose_weights_never_change_never_waits_for_weights_however_long_the_router_takes(world):
    slots = EngineSlots(world.make, [4], ROUTER, needs_weights=False)
    slots.wait_ready(1.0)
    slots.watch(SETTINGS)
    try:
        world.router_answers.clear()
        kill(world, slots, 4)
        until(lambda: len(world.actors) == 2)
        assert world.is_registering.wait(120)
        assert slots.waiting().fleet.names == (), "it would be given the trainer's weights"
        world.refusals = 1  # and started once more
        world.router_answers.set()
        until(lambda: slots.waiting().num_serving)
        assert world.registered == {(4, 2)}
    finally:
        world.router_answers.set()
        slots.stop(leaves_router=False)


def test_an_engine_that_waits_for_weights_is_not_asked_how_it_is_it_may_be_paused_to_take_them(world):
    slots = EngineSlots(world.make, range(1), ROUTER)
    slots.wait_ready(1.0)
    slots.watch(replace(SETTINGS, first_wait_s=0.0, interval_s=0.0))
    slots._monitor.stop()
    slots._monitor._stopped.clear()
    try:
        kill(world, slots, 0)
        until(lambda: slots.waiting().fleet.names)
        world.is_silent = True
        for _ in range(20):
            slots.look()
        assert slots.waiting().fleet.names == ("0.1",)
        slots.admit(["0.1"])
        for _ in range(20):
            slots.look()
        until(lambda: slots.fleet().names != ("0.1",))
    finally:
        world.is_silent = False
        slots.stop(leaves_router=False)


def test_engines_that_all_die_again_before_anything_is_generated_end_the_run(world, slots):
    for rank in (0, 1):
        kill(world, slots, rank)
        until(lambda rank=rank: f"{rank}.1" in slots.waiting().fleet.names)
    kill(world, slots, 0)
    until(lambda: "0.2" in slots.waiting().fleet.names)
    kill(world, slots, 1)
    until(lambda: slots._failure is not None)
    with pytest.raises(EngineError, match=r"every engine died again .*engine 1: its process ended.*out of memory"):
        slots.waiting()
    assert len(world.actors) == 5, "nobody is started another time"


def test_engines_between_whose_deaths_something_is_generated_are_replaced_as_ever(world, slots):
    for deaths in (1, 2, 3):
        for rank in (0, 1):
            kill(world, slots, rank)
            until(lambda name=f"{rank}.{deaths}": name in slots.waiting().fleet.names)
        slots.note_progress()
    assert slots._failure is None


def test_a_router_that_lives_on_forgets_the_engines_whatever_their_actors_do(world, slots):
    world.latest(0)._stop()
    slots.stop(leaves_router=True)
    assert world.registered == set()


def test_where_nobody_is_replaced_the_first_death_is_the_answer_to_who_needs_weights(world):
    slots = EngineSlots(world.make, range(2), ROUTER)
    slots.wait_ready(1.0)
    slots.watch(replace(SETTINGS, replaces_dead=False))
    try:
        assert slots.waiting().num_serving == 2
        kill(world, slots, 1)
        with pytest.raises(EngineError, match=r"engine 1 died with status -9.*out of memory"):
            slots.waiting()
        assert len(world.actors) == 2
    finally:
        slots.stop(leaves_router=False)


def test_an_engine_that_is_condemned_is_replaced_like_a_dead_one(world, slots):
    slots.mark_dead(["1.0", "0.7"])
    assert "1.0" not in slots.fleet().names
    until(lambda: slots.waiting().fleet.names)
    assert slots.waiting().fleet.names == ("1.1",)
    assert world.registered == {(0, 0)}


def test_an_engine_that_leaves_gets_no_new_request_and_ends_once_the_running_ones_have_returned(world, slots):
    world.latest(1).requests = 3
    slots.leave(1, "a person asked for it")
    until(lambda: world.aborted)
    slots.pause_watch()
    assert slots.fleet().names == ("0.0",), "a weight sync begins when it has left the router, and does not include it"
    assert (1, 0) not in world.registered
    slots.resume_watch()
    until(lambda: world.killed)
    assert {rank for rank, _ in world.aborted} == {1}
    assert len(world.aborted) >= 4, "the last abort found no request"
    assert not world.aborted[-1][1]
    assert world.registered == {(0, 0)}
    until(lambda: slots.states() == {0: ("serving", URL.format(0))})
    assert slots.waiting().num_serving == 1
    slots.look()
    assert len(world.actors) == 2, "it is not replaced"


def test_the_last_engine_that_serves_and_one_that_does_not_serve_cannot_leave(world, slots):
    slots.leave(0, "test")
    with pytest.raises(EngineError, match="engine 1 cannot leave: no other engine serves"):
        slots.leave(1, "test")
    until(lambda: 0 not in slots.states())
    with pytest.raises(EngineError, match="engine 0 cannot leave: it is unknown"):
        slots.leave(0, "test")


def test_an_engine_with_a_notice_leaves_and_another_takes_its_place_which_is_no_death(world, slots):
    for number in range(5):
        world.latest(1).requests = 2
        world.latest(1).has_notice = True
        slots.look()
        until(lambda number=number: slots.waiting().fleet.names == (f"1.{number + 1}",))
        slots.admit([f"1.{number + 1}"])
    assert slots.fleet().names == ("0.0", "1.5")
    assert {rank for rank, _ in world.aborted} == {1}
    assert slots.waiting().num_serving == 2


def test_where_the_dead_are_not_replaced_an_engine_with_a_notice_leaves_for_good(world):
    slots = EngineSlots(world.make, range(2), ROUTER)
    slots.wait_ready(1.0)
    slots.watch(replace(SETTINGS, replaces_dead=False))
    try:
        world.latest(0).has_notice = True
        slots.look()
        until(lambda: slots.states() == {1: ("serving", URL.format(1))})
        assert slots.waiting().num_serving == 1, "its end is no error"
    finally:
        slots.stop(leaves_router=False)


def test_an_engine_that_dies_while_it_leaves_does_not_end_the_run(world, slots):
    world.latest(1).requests = 10**6
    slots.leave(1, "test")
    until(lambda: world.aborted)
    world.latest(1).is_dead = True
    until(lambda: 1 not in slots.states())
    assert slots.waiting().num_serving == 1


def test_an_engine_leaves_after_the_weight_sync_that_it_takes_part_in(world, slots):
    slots.pause_watch()
    slots.leave(1, "test")
    time.sleep(0.05)
    assert (world.aborted, world.killed) == ([], [])
    assert slots.fleet().names == ("0.0", "1.0"), "the router still sends requests to it"
    slots.resume_watch()
    until(lambda: world.killed)


@pytest.mark.parametrize("how", ["ends", "is silent"])
def test_an_engine_that_dies_in_the_weight_sync_after_which_it_would_leave_is_lost_to_the_sync(world, slots, how):
    slots.pause_watch()
    names = slots.fleet().names
    slots.leave(1, "test")
    if how == "ends":
        world.latest(1).is_dead = True
    else:
        slots.mark_dead(["1.0"])
    assert look(slots, names) == ["1.0"], "the sync is repeated with the others"
    until(lambda: slots.states() == {0: ("serving", URL.format(0))})
    assert len(world.actors) == 2, "it was to leave: it is not replaced"


def test_an_engine_whose_registration_is_under_way_leaves_when_the_router_has_answered(world, slots):
    slots.join(2, is_guest=True)
    until(lambda: slots.waiting().fleet.names == ("2.0",))
    world.latest(2).stop = Method(lambda: None)  # a server of others goes on
    world.router_answers.clear()
    admission = threading.Thread(target=slots.admit, args=(["2.0"],))
    admission.start()
    assert world.is_registering.wait(120)
    slots.leave(2, "test")
    time.sleep(0.3)
    world.router_answers.set()
    admission.join()
    until(lambda: 2 not in slots.states())
    assert world.registered == {(0, 0), (1, 0)}


def test_a_look_may_end_after_an_engine_has_gone(world, slots):
    leaving = slots._by_rank[1]

    def ended() -> bool:
        slots._lose(leaving, "test")
        return True

    world.latest(1).has_ended = Method(ended)
    slots.look()
    assert list(slots.states()) == [0]


def test_an_engine_with_a_notice_that_cannot_be_started_again_is_gone(world, slots):
    world.broken.add(1)  # its node was taken away
    world.latest(1).has_notice = True
    slots.look()
    until(lambda: 1 not in slots.states())
    assert slots.waiting().num_serving == 1, "the run goes on"


def test_an_engine_that_is_replaced_after_a_notice_does_not_count_as_one_that_leaves(world, slots):
    world.latest(1).requests = 10**6
    world.latest(1).has_notice = True
    slots.look()
    until(lambda: world.aborted)
    assert slots.states()[1][0] == "preempted"
    world.latest(1).requests = 0
    until(lambda: slots.waiting().fleet.names == ("1.1",))
    assert slots.states()[1][0] == "waiting"


def test_the_last_engine_of_its_kind_cannot_leave(world):
    slots = EngineSlots(world.make, range(3), ROUTER, kind_of=lambda rank: "prefill" if rank == 0 else "decode")
    slots.wait_ready(1.0)
    slots.watch(SETTINGS)
    try:
        with pytest.raises(EngineError, match="engine 0 cannot leave: no other prefill engine serves"):
            slots.leave(0, "test")
        slots.leave(2, "test")
        until(lambda: 2 not in slots.states())
    finally:
        slots.stop(leaves_router=False)


def test_an_engine_that_joins_waits_for_weights_then_serves_and_may_come_back(world, slots):
    slots.join(2)
    until(lambda: slots.waiting().fleet.names == ("2.0",))
    assert (2, 0) not in world.registered, "it has the weights of the checkpoint"
    slots.admit(["2.0"])
    assert slots.states()[2] == ("serving", URL.format(2))
    slots.leave(2, "test")
    until(lambda: 2 not in slots.states())
    slots.join(2)
    until(lambda: slots.waiting().fleet.names == ("2.1",))


def test_an_engine_that_cannot_start_does_not_join_and_the_others_go_on(world, slots):
    world.broken.add(2)
    slots.join(2)
    until(lambda: 2 not in slots.states())
    assert slots.waiting().num_serving == 2


def test_a_guest_that_dies_is_gone(world, slots):
    slots.join(2, is_guest=True)
    until(lambda: slots.waiting().fleet.names == ("2.0",))
    slots.admit(["2.0"])
    assert kill(world, slots, 2) == ["2.0"]
    until(lambda: 2 not in slots.states())
    assert slots.waiting().num_serving == 2
    assert len(world.actors) == 3
