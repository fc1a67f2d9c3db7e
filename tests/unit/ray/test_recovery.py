"""When engines that started again get their weights: in the middle of a rollout, or with the next sync.

Manager and trainer are fakes that keep a diary.
"""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest

from slime.backends.protocols import EngineInfo
from slime.config.run_config import RunConfig
from slime.ray.engines import health as recovery_module
from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines
from slime.ray.engines.health import Recovery
from slime.ray.run.loop import Run
from slime.ray.train_actor import SyncReport
from slime.utils.errors import DeadlineExceeded, EngineError, EngineSilent


def fleet(*names: str) -> RayEngineFleet:
    return RayEngineFleet(names, [EngineInfo(f"http://{name}", 1) for name in names], names)


class Manager:
    """Answers the questions of the recovery; ``waiting`` and ``lost`` are what a test makes of them."""

    def __init__(self) -> None:
        self.waiting = WaitingEngines(fleet(), 1)
        self.fleets = [fleet("0.0", "1.0")]
        self.lost: list[str] = []
        self.diary: list[tuple[str, object]] = []

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=lambda *arguments: lambda: self._answer(name, *arguments))

    def _answer(self, name: str, *arguments):
        self.diary.append((name, *arguments))
        match name:
            case "waiting_engines":
                return self.waiting
            case "begin_sync":
                return self.fleets.pop(0) if len(self.fleets) > 1 else self.fleets[0]
            case "lost_engines":
                return self.lost
            case "admit_engines":
                self.waiting = WaitingEngines(fleet(), 1)
            case "mark_engines_dead":
                self.lost = [*self.lost, *arguments[0]]
            case "end_sync":
                pass
            case _:
                raise AssertionError(name)

    def said(self, name: str) -> list:
        return [entry[1:] for entry in self.diary if entry[0] == name]


@pytest.fixture
def manager(monkeypatch) -> Manager:
    slices(monkeypatch, 0)
    monkeypatch.setattr(recovery_module, "_SLICE_S", 0.001)
    return Manager()


def slices(monkeypatch, number: int) -> None:
    """The rollout takes ``number`` slices."""

    def get(ref, seconds, what, fix="", *, meanwhile=None, slice_s=0.0):
        for _ in range(number if meanwhile is not None else 0):
            meanwhile()
        return ref()

    monkeypatch.setattr(recovery_module, "get", get)


def a_run(manager: Manager, *, trained: int, version: str | None, trainer: bool = True) -> tuple[Run, list]:
    pushes: list = []

    def update_weights(engines: RayEngineFleet, version: str) -> SyncReport:
        pushes.append((engines.names, version))
        return SyncReport()

    args = Namespace(rollout_timeout=5.0, engine_start_timeout=5.0, weight_sync_timeout=5.0, save_interval=None)
    run = Run(
        RunConfig.of(args),
        None,
        manager,
        None,
        SimpleNamespace(update_weights=update_weights) if trainer else None,
        0,
        9,
        fleet("0.0"),
        {},
        SimpleNamespace(),
    )
    run._num_trained, run._version = trained, version
    run.watch_engines()
    return run, pushes


def test_an_engine_that_waits_gets_the_weights_of_the_others_during_the_rollout_and_then_serves(manager, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(manager, trained=3, version="3")
    manager.waiting = WaitingEngines(fleet("1.1"), 1)
    assert run._engines_work(lambda: "samples", "rollout 3") == "samples"
    assert pushes == [(("1.1",), "3")]
    assert manager.said("admit_engines") == [(("1.1",),)]


def test_while_others_serve_older_weights_than_the_trainers_it_waits_for_the_next_sync(manager, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(manager, trained=4, version="3")
    manager.waiting = WaitingEngines(fleet("1.1"), 1)
    run._engines_work(lambda: None, "rollout 4")
    assert (pushes, manager.said("admit_engines")) == ([], [])


def test_with_nobody_left_that_serves_the_newest_weights_are_as_good(manager, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(manager, trained=4, version="3")
    manager.waiting = WaitingEngines(fleet("0.1"), 0)
    run._engines_work(lambda: None, "rollout 4")
    assert pushes == [(("0.1",), "4")]
    assert run._version == "4", "what the rollout ends with is what its tokens are checked against"


def test_a_trainer_at_work_is_not_disturbed(manager, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(manager, trained=3, version="3")
    manager.waiting = WaitingEngines(fleet("0.1"), 0)
    with run._trainer_in_use:
        run._engines_work(lambda: None, "rollout 3")
    assert pushes == []


def test_without_a_trainer_the_weights_of_the_checkpoint_are_right(manager, monkeypatch):
    slices(monkeypatch, 2)
    run, _ = a_run(manager, trained=0, version=None, trainer=False)
    manager.waiting = WaitingEngines(fleet("0.1"), 0)
    run._engines_work(lambda: None, "rollout 0")
    assert manager.said("admit_engines") == [(("0.1",),)]


def test_an_engine_that_dies_of_its_weights_does_not_end_the_rollout_but_another_failure_does(manager, monkeypatch):
    def fail(waiting):
        raise EngineError("connection reset")

    slices(monkeypatch, 1)
    manager.waiting = WaitingEngines(fleet("1.1"), 1)
    manager.lost = ["1.1"]
    assert Recovery(manager, fail, 5.0).get(lambda: 7, 5.0, "a rollout", "") == 7
    assert manager.said("admit_engines") == []
    slices(monkeypatch, 1)
    manager.lost = []
    with pytest.raises(EngineError, match="connection reset"):
        Recovery(manager, fail, 5.0).get(lambda: 7, 5.0, "a rollout", "")


def test_a_sync_that_an_engine_dies_of_is_sent_again_to_the_others(manager):
    manager.fleets = [fleet("0.0", "1.0"), fleet("0.0")]
    tried = []

    def update(engines: RayEngineFleet) -> SyncReport:
        tried.append(engines.names)
        manager.lost = ["1.0"] if len(tried) == 1 else []
        if manager.lost:
            raise EngineError("connection reset by peer")
        return SyncReport(1.0, 10)

    assert Recovery(manager, lambda waiting: True, 5.0).sync(update) == SyncReport(1.0, 10)
    assert tried == [("0.0", "1.0"), ("0.0",)]
    assert manager.said("end_sync") == [(("0.0",),)]


def test_a_sync_that_fails_although_all_engines_live_ends_the_run(manager):
    def update(engines):
        raise EngineError("engine 0 refused update_weights_from_distributed")

    with pytest.raises(EngineError, match="refused"):
        Recovery(manager, lambda waiting: True, 5.0).sync(update)


def test_a_sync_waits_for_an_engine_when_all_are_dead_but_not_forever(manager, monkeypatch):
    manager.fleets = [fleet(), fleet(), fleet("0.1")]
    synced = []
    Recovery(manager, lambda waiting: True, 5.0).sync(lambda engines: synced.append(engines.names) or SyncReport())
    assert synced == [("0.1",)]
    monkeypatch.setattr(recovery_module, "_CALL_TIMEOUT_S", 0.0)
    manager.fleets = [fleet()]
    with pytest.raises(DeadlineExceeded, match="--engine-start-timeout"):
        Recovery(manager, lambda waiting: True, 0.02).sync(lambda engines: SyncReport())


def test_an_engine_that_falls_silent_in_a_sync_is_condemned_and_the_others_get_the_weights(manager):
    manager.fleets = [fleet("0.0", "1.0"), fleet("0.0")]
    updates = []

    def update(engines: RayEngineFleet) -> SyncReport:
        updates.append(engines.names)
        if "1.0" in engines.names:
            raise EngineSilent("engine 1 did not answer", ["http://1.0"])
        return SyncReport()

    Recovery(manager, lambda waiting: True, 5.0).sync(update)
    assert updates == [("0.0", "1.0"), ("0.0",)]
    assert manager.said("mark_engines_dead") == [(["1.0"],)]
