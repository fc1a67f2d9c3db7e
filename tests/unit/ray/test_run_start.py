"""A run that cannot be started leaves nothing open."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray import placement_group
from slime.ray.run import start
from slime.ray.watch.failure_report import Shortage
from slime.utils.errors import DeadlineExceeded

STEPS = ("create_tracker", "create_placement_groups", "create_data_buffer", "create_rollout_manager")


@pytest.mark.parametrize("breaks", STEPS)
def test_what_was_made_before_a_start_failed_is_ended_in_the_reverse_order(
    breaks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[str] = []
    made = {
        "create_tracker": SimpleNamespace(close=lambda: ended.append("create_tracker")),
        "create_placement_groups": {"rollout": None},
        "create_data_buffer": (SimpleNamespace(kill=lambda: ended.append("create_data_buffer")), "ledger"),
    }

    def step(name: str) -> Any:
        def make(*arguments: Any, **more: Any) -> Any:
            if name == breaks:
                raise DeadlineExceeded(name)
            return made[name]

        return make

    for name in STEPS:
        monkeypatch.setattr(start, name, step(name))
    monkeypatch.setattr(start, "release_placement_groups", lambda slots: ended.append("create_placement_groups"))
    monkeypatch.setattr(start, "resumed_from", lambda args: None)
    monkeypatch.setattr(start, "run_directory", lambda args: tmp_path)
    monkeypatch.setattr(start, "Progress", lambda directory, ledger: None)
    with pytest.raises(DeadlineExceeded, match=breaks):
        start.start_run(SimpleNamespace(save=None, start_rollout_id=None, deterministic_mode=False))  # type: ignore[arg-type]
    assert ended == list(STEPS[: STEPS.index(breaks)])[::-1]


def test_the_folder_of_checkpoints_may_be_that_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def create_tracker(args: Any, *, is_new: bool) -> None:
        assert is_new
        raise DeadlineExceeded("reached")

    monkeypatch.setattr(start, "create_tracker", create_tracker)
    (tmp_path / "engines").mkdir()  # the log of the preloading process is there before the start
    paths = {"save": str(tmp_path), "load": str(tmp_path), "hf_checkpoint": "model"}
    with pytest.raises(DeadlineExceeded, match="reached"):
        start.start_run(SimpleNamespace(**paths, start_rollout_id=None))  # type: ignore[arg-type]


def test_slots_that_do_not_come_in_time_are_not_asked_for_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Any] = []
    group = SimpleNamespace(wait=lambda timeout_seconds: False)
    monkeypatch.setattr(placement_group, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(placement_group, "remove_placement_group", removed.append)
    missing = Shortage({"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 8}, {"CPU": 1, "GPU": 8})
    monkeypatch.setattr(placement_group, "shortage_of", lambda bundles: missing)
    monkeypatch.setattr(placement_group, "is_embedded", lambda: False)
    with pytest.raises(
        DeadlineExceeded, match=r"to reserve 2 device slots.*CPU: 2 asked for, 1 in the cluster, 1 free"
    ):
        placement_group._reserve(2, 0.0)
    assert removed == [group]


@pytest.mark.parametrize(("trainer_s", "engine_s", "seconds"), [(7200.0, 3600.0, 7200.0), (7200.0, 10600.0, 10720.0)])
def test_the_wait_for_the_start_outlives_that_of_the_engines(trainer_s: float, engine_s: float, seconds: float) -> None:
    settings = start.StartArgs(trainer_start_timeout=trainer_s, engine_start_timeout=engine_s)
    assert settings.all_start_timeout == seconds


def test_the_processes_that_report_their_nodes_have_the_time_of_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []

    def get(refs: Any, *about: Any) -> Any:
        waits.append(about)
        raise DeadlineExceeded("probes")

    group = SimpleNamespace(wait=lambda timeout_seconds: True)
    remote = SimpleNamespace(options=lambda **_: remote, remote=lambda *_: SimpleNamespace(locate=remote))
    fake = SimpleNamespace(remote=lambda **_: lambda body: remote)
    for name, value in {
        "placement_group": lambda bundles, strategy: group,
        "placement_group_table": lambda group: {"bundles_to_node_id": {0: "a", 1: "b"}},
        "remove_placement_group": lambda group: None,
        "worker_env": dict,
        "ray": fake,
        "get": get,
    }.items():
        monkeypatch.setattr(placement_group, name, value)
    monkeypatch.setattr(placement_group.GpuSlots, "strategy", lambda slots, slot: None)
    with pytest.raises(DeadlineExceeded, match="probes"):
        placement_group._reserve(2, 1234.0)
    assert waits == [(1234.0, "device slots to report their nodes", "--placement-timeout")]
