"""The ranks of a trainer that ends while engines generate, and starts again from its last checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray import actor_group
from slime.ray.actor_group import RayTrainGroup
from slime.ray.placement_group import GpuSlots
from slime.ray.train_actor import TrainActor


class FakeRank:
    """Every ``rank.method.remote(...)`` returns at once."""

    def __init__(self, args: Any, rank: int) -> None:
        self.args, self.rank = args, rank

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: ("127.0.0.1", 1) if method == "rendezvous" else 3)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeRank]:
    ranks: list[FakeRank] = []

    def remote(args: Any, rank: int, *more: Any) -> FakeRank:
        ranks.append(FakeRank(args, rank))
        return ranks[-1]

    options = SimpleNamespace(options=lambda **settings: SimpleNamespace(remote=remote))
    monkeypatch.setattr(actor_group.ray, "remote", lambda body: options)
    monkeypatch.setattr(actor_group.ray, "wait", lambda calls, **settings: (calls, []))
    monkeypatch.setattr(actor_group.ray, "kill", lambda rank: setattr(rank, "is_killed", True))
    monkeypatch.setattr(actor_group, "get", lambda refs, *about, **more: refs)
    monkeypatch.setattr(actor_group, "worker_env", dict)
    monkeypatch.setattr(GpuSlots, "strategy", lambda slots, slot: None)
    monkeypatch.setattr(actor_group, "continued", lambda config: config.with_values(load=config.args.save))
    return ranks


def test_a_trainer_that_was_released_starts_again_from_what_it_saved(started):
    args = SimpleNamespace(
        train_env_vars={},
        sglang_argv=[],
        deterministic_mode=False,
        trainer_start_timeout=1.0,
        load="/first",
        save="/saved",
        rollout_data_transport="object-store",
    )
    group = RayTrainGroup(args, GpuSlots(None, [0, 1], [0, 1]))
    group.start_setup(with_ref=True)
    group.create()
    assert [rank.rank for rank in started] == [0, 1], "nothing to do while they live"
    group.release()
    assert all(rank.is_killed for rank in started)
    assert group.ranks == []
    group.release()
    group.create()
    assert [rank.rank for rank in started] == [0, 1, 0, 1]
    assert [rank.args.load for rank in started] == ["/first", "/first", "/saved", "/saved"]
    assert group.ranks == started[2:]


def test_ranks_of_two_trainers_on_a_host_never_meet_at_one_port():
    firsts = [object.__new__(TrainActor) for _ in range(3)]  # none listens yet
    assert len({first.rendezvous() for first in firsts}) == 3
