"""The Data Buffer actor's own part: prompts that were under way at a checkpoint are not lost."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.data.ledger import LEDGER, audit, read_ledger
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
        args = Namespace(
            data_source_path=f"{__file__}:CountingSource", save=str(tmp_path), load=str(tmp_path), heartbeat_timeout=0
        )
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
    first.settle(7, [0, 2], keeps_others=True)
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
    actor.settle(7, [0], keeps_others=False)
    actor.save(7)
    assert not list((tmp_path / "rollout").glob("outstanding_7*"))


def test_the_ledger_says_what_became_of_every_group(tmp_path: Path):
    args = Namespace(
        data_source_path=f"{__file__}:CountingSource", save=str(tmp_path), load=str(tmp_path), heartbeat_timeout=0
    )
    first = DataBuffer(args, tmp_path / LEDGER)
    first.start()
    first.begin(0)
    groups = first.get_samples(6)
    first.add_samples([groups[5]])
    first.settle(0, [0, 1], keeps_others=True)
    first.save(0)
    first.trained(0)
    first.settle(1, [2], keeps_others=False)  # lost with the process: the run begins again after rollout 0
    second = DataBuffer(args, tmp_path / LEDGER)
    second.start()
    second.begin(1)
    second._source.next = 6  # what a source that keeps its state would do
    second._outstanding |= {number: groups[number] for number in (2, 3, 4)}
    second.settle(1, [2, 3], keeps_others=False)
    second.trained(1)
    entries, _ = read_ledger(tmp_path / LEDGER)
    assert [entry["groups"] for entry in entries if entry["event"] == "begin"] == ["", "2-4"]
    found = audit(entries)
    assert found.is_clean
    assert found.counts == {"trained": 4, "dropped": 1, "waiting": 1}


def test_groups_that_a_rollout_rejects_are_not_drawn_again_although_others_stay_under_way(buffer):
    first = buffer()
    groups = first.get_samples(3)
    first.drop(7, [groups[1]])
    first.settle(7, [0], keeps_others=True)
    first.save(7)
    second = buffer()
    second.begin(8)
    assert numbers(second._source.returned) == [2]
