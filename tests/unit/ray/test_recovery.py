"""When engines that started again get their weights: in the middle of a rollout, or with the next sync.

Engines and trainer are fakes that keep a diary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from slime.backends import AdapterProof, Probe
from slime.ray.engines import recovery as recovery_module
from slime.ray.engines.fleet import RayEngineFleet, WaitingEngines
from slime.ray.engines.recovery import Recovery, RemoteEngines
from slime.ray.engines.servers import RolloutServers
from slime.ray.run.loop import Run
from slime.ray.train_actor import SyncReport
from slime.utils.errors import DeadlineExceeded, EngineError, EngineSilent
from tests.unit.ray.runs import Engines, fleet, make_run


@pytest.fixture
def engines(monkeypatch) -> Engines:
    slices(monkeypatch, 0)
    monkeypatch.setattr(recovery_module, "_SLICE_S", 0.001)
    return Engines()


def slices(monkeypatch, number: int) -> None:
    """The rollout takes ``number`` slices."""

    def get(ref, seconds, what, fix="", *, meanwhile=None, slice_s=0.0):
        for _ in range(number if meanwhile is not None else 0):
            meanwhile()
        return ref()

    monkeypatch.setattr(recovery_module, "get", get)


def a_run(engines: Engines, *, trained: int, version: int | None, trainer: bool = True) -> tuple[Run, list]:
    """A run that was trained on ``trained`` rollouts. Its engines have the weights of ``version``."""
    pushes: list = []

    def update_weights(engines: RayEngineFleet, version: str) -> SyncReport:
        pushes.append((engines.names, version))
        return SyncReport()

    fake = SimpleNamespace(update_weights=update_weights) if trainer else None
    run = make_run(engines=engines, trainer=fake, rollout_ids=range(trained, 9))
    if version is not None:
        run.sync_weights(version)
        pushes.clear()
    return run, pushes


def test_an_engine_that_waits_gets_the_weights_of_the_others_during_the_rollout_and_then_serves(engines, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(engines, trained=3, version=3)
    engines.waiting = WaitingEngines(fleet("1.1"), 1)
    assert run._wait_for_engines(lambda: "samples", "rollout 3") == "samples"
    assert pushes == [(("1.1",), "3")]
    assert engines.calls_of("admit") == [(("1.1",),)]


def proving(run: Run, monkeypatch: pytest.MonkeyPatch, wrong: str) -> list[tuple[Any, ...]]:
    """Let ``run`` send adapters. Engines have another one than ``wrong``. Returns (engines, version, one before)."""
    asked: list[tuple[Any, ...]] = []

    def verify(engines: RayEngineFleet, proof: AdapterProof, timeout_s: float, before: Probe | None) -> None:
        asked.append((engines.names, proof.probe.version, before and before.version))
        if proof.probe.version == wrong:
            raise EngineError("the adapter is stale")

    def update_weights(engines: RayEngineFleet, version: str) -> SyncReport:
        return SyncReport(proof=AdapterProof(Probe(version, [], [], []), {}))

    monkeypatch.setattr(recovery_module, "verify_adapter", verify)
    run.trainer.update_weights = update_weights  # type: ignore[union-attr,method-assign,assignment]
    return asked


def test_a_fault_of_an_adapter_ends_the_run_at_its_sync(engines, monkeypatch):
    run, _ = a_run(engines, trained=1, version=None)
    asked = proving(run, monkeypatch, wrong="2")
    run.sync_weights(1)
    with pytest.raises(EngineError, match="the adapter is stale"):
        run.sync_weights(2)
    assert asked == [(("0.0", "1.0"), "1", None), (("0.0", "1.0"), "2", "1")]


def test_an_engine_that_waits_serves_no_request_before_its_adapter_is_proved(engines, monkeypatch):
    slices(monkeypatch, 1)
    run, _ = a_run(engines, trained=3, version=3)
    asked = proving(run, monkeypatch, wrong="3")
    engines.waiting = WaitingEngines(fleet("1.1"), 1)
    with pytest.raises(EngineError, match="the adapter is stale"):
        run._wait_for_engines(lambda: "samples", "rollout 3")
    assert asked == [(("1.1",), "3", None)]
    assert engines.calls_of("admit") == []


def test_while_others_serve_older_weights_than_the_trainers_it_waits_for_the_next_sync(engines, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(engines, trained=4, version=3)
    engines.waiting = WaitingEngines(fleet("1.1"), 1)
    run._wait_for_engines(lambda: None, "rollout 4")
    assert (pushes, engines.calls_of("admit")) == ([], [])


def test_with_nobody_left_that_serves_the_newest_weights_are_as_good(engines, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(engines, trained=4, version=3)
    engines.waiting = WaitingEngines(fleet("0.1"), 0)
    run._wait_for_engines(lambda: None, "rollout 4")
    assert pushes == [(("0.1",), "4")]
    assert run._version == "4", "what the rollout ends with is what its tokens are checked against"


def test_a_trainer_at_work_is_not_disturbed(engines, monkeypatch):
    slices(monkeypatch, 5)
    run, pushes = a_run(engines, trained=3, version=3)
    engines.waiting = WaitingEngines(fleet("0.1"), 0)
    with run._trainer_in_use:
        run._wait_for_engines(lambda: None, "rollout 3")
    assert pushes == []


def test_without_a_trainer_the_weights_of_the_checkpoint_are_right(engines, monkeypatch):
    slices(monkeypatch, 2)
    run, _ = a_run(engines, trained=0, version=None, trainer=False)
    engines.waiting = WaitingEngines(fleet("0.1"), 0)
    run._wait_for_engines(lambda: None, "rollout 0")
    assert engines.calls_of("admit") == [(("0.1",),)]


def test_an_engine_that_dies_of_its_weights_does_not_end_the_rollout_but_another_failure_does(engines, monkeypatch):
    def fail(fleet, num_serving):
        raise EngineError("connection reset")

    slices(monkeypatch, 1)
    engines.waiting = WaitingEngines(fleet("1.1"), 1)
    engines.lost = ["1.1"]
    assert Recovery(engines, fail, 5.0).get(lambda: 7, 5.0, "a rollout", "") == 7
    assert engines.calls_of("admit") == []
    slices(monkeypatch, 1)
    engines.lost = []
    with pytest.raises(EngineError, match="connection reset"):
        Recovery(engines, fail, 5.0).get(lambda: 7, 5.0, "a rollout", "")


def test_a_sync_that_an_engine_dies_of_is_sent_again_to_the_others(engines):
    engines.fleets = [fleet("0.0", "1.0"), fleet("0.0")]
    tried = []

    def update(living: RayEngineFleet) -> SyncReport:
        tried.append(living.names)
        engines.lost = ["1.0"] if len(tried) == 1 else []
        if engines.lost:
            raise EngineError("connection reset by peer")
        return SyncReport(1.0, 10)

    assert Recovery(engines, lambda waiting: True, 5.0).sync(update) == SyncReport(1.0, 10)
    assert tried == [("0.0", "1.0"), ("0.0",)]
    assert engines.calls_of("end_sync") == [(("0.0",),)]


def test_a_sync_that_fails_although_all_engines_live_ends_the_run(engines):
    def update(living):
        raise EngineError("engine 0 refused update_weights_from_distributed")

    with pytest.raises(EngineError, match="refused"):
        Recovery(engines, lambda waiting: True, 5.0).sync(update)


def test_a_sync_waits_for_an_engine_when_all_are_dead_but_not_forever(engines, monkeypatch):
    engines.fleets = [fleet(), fleet(), fleet("0.1")]
    synced = []
    Recovery(engines, lambda waiting: True, 5.0).sync(lambda living: synced.append(living.names) or SyncReport())
    assert synced == [("0.1",)]
    monkeypatch.setattr(recovery_module, "_CALL_TIMEOUT_S", 0.0)
    engines.fleets = [fleet()]
    with pytest.raises(DeadlineExceeded, match="--engine-start-timeout"):
        Recovery(engines, lambda waiting: True, 0.02).sync(lambda living: SyncReport())


def test_an_engine_that_falls_silent_in_a_sync_is_condemned_and_the_others_get_the_weights(engines):
    engines.fleets = [fleet("0.0", "1.0"), fleet("0.0")]
    updates = []

    def update(living: RayEngineFleet) -> SyncReport:
        updates.append(living.names)
        if "1.0" in living.names:
            raise EngineSilent("engine 1 did not answer", ["http://1.0"])
        return SyncReport()

    Recovery(engines, lambda waiting: True, 5.0).sync(update)
    assert updates == [("0.0", "1.0"), ("0.0",)]
    assert engines.calls_of("mark_dead") == [(["1.0"],)]


@pytest.mark.parametrize("name", ["waiting", "admit", "begin_sync", "end_sync", "mark_dead", "lost", "receivers"])
def test_a_method_reaches_the_manager_by_reference(name):
    method = getattr(RolloutServers, name)
    assert cloudpickle.loads(cloudpickle.dumps(method)) is method


@pytest.mark.parametrize("name", ["offload", "onload_weights", "onload_kv"])
def test_memory_verbs_are_called_in_the_manager_with_the_deadline_of_a_sync(name, monkeypatch):
    calls = []

    def get(ref, seconds, what, fix=""):
        return calls.append((ref, seconds, fix))

    monkeypatch.setattr(recovery_module, "get", get)
    remote = SimpleNamespace(remote=lambda method: cloudpickle.loads(cloudpickle.dumps(method)))
    getattr(RemoteEngines(SimpleNamespace(on_engines=remote), 7.0), name)()
    assert calls == [(getattr(RolloutServers, name), 7.0, "--weight-sync-timeout")]
