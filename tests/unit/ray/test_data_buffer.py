"""The Data Buffer actor's own part: prompts that were under way at a checkpoint are not lost."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.ray.data_buffer import DataBuffer


class CountingSource:
    """A source as a user writes one: no state of its own worth saving."""

    def __init__(self, args: Namespace) -> None:
        self.next, self.returned = 0, []

    def get_samples(self, num_samples: int) -> list[Any]:
        self.next += num_samples
        return [[Sample(group_index=i, prompt=f"p{i}")] for i in range(self.next - num_samples, self.next)]

    def add_samples(self, samples: list[Any]) -> None:
        self.returned += samples

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int | None = None) -> None: ...

    def __len__(self) -> int:
        return 100


@pytest.fixture
def buffer(tmp_path: Path):
    def start() -> DataBuffer:
        args = Namespace(data_source_path=f"{__file__}:CountingSource", save=str(tmp_path), load=str(tmp_path))
        actor = DataBuffer(args)
        actor.start()
        return actor

    return start


def numbers(groups: list[Any]) -> list[int]:
    return [group[0].group_index for group in groups]


def test_prompts_under_way_at_a_checkpoint_are_drawn_again_after_a_restart(buffer):
    first = buffer()
    groups = first.get_samples(5)
    first.add_samples([groups[4]])
    first.settle([0, 2])
    first.save(7)
    second = buffer()
    second.load(7)
    assert numbers(second._source.returned) == [1, 3]
    assert second._source.returned[0][0].prompt == "p1"


def test_a_rollout_that_keeps_nothing_leaves_nothing_behind_also_not_from_before(buffer, tmp_path: Path):
    actor = buffer()
    actor.get_samples(3)
    actor.save(7)
    assert list((tmp_path / "rollout").glob("outstanding_7*"))
    actor.settle(None)
    actor.save(7)
    assert not list((tmp_path / "rollout").glob("outstanding_7*"))
