"""Fault schedules of the simulated control plane. ``benchmarks/simulate.py`` runs more of them."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from slime.ray.engines.slots import EngineSlots
from slime.ray.journal import Journal
from slime.ray.rollout import RolloutManager
from slime.ray.run.loop import Run
from tests.programs import ROOT
from tests.simulation.bugs import BUGS
from tests.simulation.faults import Fault
from tests.simulation.run import installed, simulate

_BLOCK = 50


@pytest.fixture(scope="module", autouse=True)
def _in_simulation() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize("first", range(0, 500, _BLOCK))
def test_every_schedule_keeps_the_law_of_the_ledger(first):
    results = [simulate(seed) for seed in range(first, first + _BLOCK)]
    broken = {result.seed: result.problems for result in results if result.problems}
    assert not broken, f"replay one with: python benchmarks/simulate.py --seed {min(broken)}\n{broken}"


@pytest.mark.parametrize("seed", range(0, 40, 5))
def test_a_seed_replays_exactly(seed):
    first, second = simulate(seed, keeps_trace=True), simulate(seed, keeps_trace=True)
    assert first.trace == second.trace
    assert first.digest == second.digest


def test_a_long_run_keeps_no_objects_of_earlier_rollouts(monkeypatch):
    generate, counts = RolloutManager.generate, []

    def counting(self, rollout_id, *more):
        if rollout_id in (20, 95):
            gc.collect()
            counts.append(Counter(kind for kind in map(type, gc.get_objects()) if "slime." in str(kind)))
        return generate(self, rollout_id, *more)

    monkeypatch.setattr(RolloutManager, "generate", counting)
    assert not simulate(3, mode="train", planned=[], num_rollouts=100).problems
    before, after = counts
    # one object of each of the 75 rollouts; the simulated event loop keeps up to 64 tasks
    assert {str(kind): count for kind, count in (after - before).items() if count >= 60} == {}


def _broken_by_kills(mode: str) -> dict[int, list[str]]:
    """Event -> broken laws of a run whose driver is killed at that event."""
    events = range(1, simulate(3, mode=mode, planned=[]).events, 29)
    results = {at: simulate(3, mode=mode, planned=[Fault(at, "kill", "driver")]) for at in events}
    assert sum(result.starts > 1 for result in results.values()) > len(events) / 2
    return {at: result.problems for at, result in results.items() if result.problems}


@pytest.mark.parametrize("mode", ["train_async", "fully async"])
def test_a_run_trains_on_the_same_samples_again_wherever_its_driver_was_killed(mode):
    assert _broken_by_kills(mode) == {}


def test_the_journal_is_what_keeps_the_samples(monkeypatch):
    monkeypatch.setattr(Journal, "of", lambda args: None)
    problems = [problem for broken in _broken_by_kills("fully async").values() for problem in broken]
    assert len(problems) > 3
    assert all("and after a death on" in problem for problem in problems)


def test_an_evaluation_whose_engines_all_return_with_newer_weights_is_repeated():
    assert not simulate(653).problems


def test_devices_that_arrive_when_a_run_ends_end_no_thread_with_an_error():
    assert not simulate(2428).problems


def test_an_evaluation_that_new_weights_interrupt_is_found(monkeypatch):
    sync_weights = Run.sync_weights

    def without_waiting(self, num_trained):
        under_way, self._evaluation = self._evaluation, None
        sync_weights(self, num_trained)
        self._evaluation = under_way

    monkeypatch.setattr(Run, "sync_weights", without_waiting)
    slow = [Fault(at, "slow network", seconds=60.0) for at in range(200, 340, 20)]
    mode = "train_async, two ranks, background evaluation"
    results = [simulate(seed, mode=mode, planned=[fault]) for seed in (4, 5) for fault in slow]
    found = [problem for result in results for problem in result.problems]
    assert found
    assert all(re.fullmatch(r"the evaluation after rollout \d scored tokens of versions .*", each) for each in found)


def test_an_engine_that_is_to_leave_and_dies_in_a_weight_sync_ends_no_start(monkeypatch):
    def errors() -> list[str]:
        syncs = [[Fault(at, "engines join or leave"), Fault(at + 6, "kill", "server")] for at in range(230, 254, 3)]
        return [error for planned in syncs for error in simulate(2, mode="train", planned=planned).errors]

    assert errors() == []
    find_ended = EngineSlots._find_ended

    def without_leaving(self):
        states = self.states()
        return {rank: ended for rank, ended in find_ended(self).items() if states[rank][0] != "leaving"}

    monkeypatch.setattr(EngineSlots, "_find_ended", without_leaving)
    assert errors(), "no schedule kills an engine between its request to leave and the end of a sync"


@pytest.mark.parametrize("name", BUGS)
def test_the_simulation_finds_a_past_bug(name):
    bug = BUGS[name]

    def problems(seed: int) -> list[str]:
        return simulate(seed, mode=bug.mode, planned=bug.faults).problems

    with bug.present():
        found = next((seed for seed in (*bug.seeds, *range(150)) if problems(seed)), None)
    assert found is not None, f"no schedule finds it: {bug.what}"
    assert not problems(found)


def test_the_command_counts_what_it_simulates_and_leaves_no_files(tmp_path):
    # ``simulate.py --kills`` does at every event what the tests of kills do at some
    command = [sys.executable, "benchmarks/simulate.py", "--seeds", "4", "--jobs", "1"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("4 fault schedules in "), done.stdout
    assert "0 broke a law" in done.stdout
    assert list(tmp_path.glob("slime-*")) == []
