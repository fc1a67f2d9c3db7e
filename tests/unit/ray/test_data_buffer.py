"""The Data Buffer actor's own part: prompts that were under way at a checkpoint are not lost."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.config.groups import RunConfig
from slime.data.ledger import LEDGER, audit, read_ledger
from slime.data.sample import Sample
from slime.ray import data_buffer
from slime.ray.data_buffer import DataBuffer, DataBufferClient
from slime.utils.errors import DataError
from tests.unit.rollout.fake_engine import make_args


class CountingSource:
    """A source as a user writes one, without state to save."""

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
        actor = DataBuffer(RunConfig.of(args))
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
    first = DataBuffer(RunConfig.of(args), tmp_path / LEDGER)
    first.start()
    first.begin(0)
    groups = first.get_samples(6)
    first.add_samples([groups[5]])
    first.settle(0, [0, 1], keeps_others=True)
    first.save(0)
    first.trained(0)
    first.settle(1, [2], keeps_others=False)  # lost with the process: the run begins again after rollout 0
    second = DataBuffer(RunConfig.of(args), tmp_path / LEDGER)
    second.start()
    second.begin(1)
    second._source.next = 6  # as a source that keeps its state does
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


class OfFlatSamples:
    """A source that gives samples without numbers, and has no method but its own."""

    level = 3

    def get_samples(self, num_samples: int) -> list[Sample]:
        return [Sample(prompt=f"p{i}") for i in range(num_samples)]

    def raise_level(self, by: int, *, twice: bool = False) -> int:
        self.level += by * (1 + twice)
        return self.level


class LocalActor:
    """``actor.method.remote(...)`` without a process."""

    def __init__(self, body: DataBuffer) -> None:
        self._body = body

    def __getattr__(self, name: str) -> Any:
        return Namespace(remote=lambda *arguments: getattr(self._body, name)(*arguments))


@pytest.fixture
def client(monkeypatch, tmp_path: Path):
    def make(source: str, **values: Any) -> DataBufferClient:
        monkeypatch.setattr(data_buffer, "get", lambda ref, *_: ref)
        values |= {"data_source_path": source, "heartbeat_timeout": 0, "save": str(tmp_path)}
        args = make_args(values.pop("hf_checkpoint", ""), 0, **values)
        body = DataBuffer(RunConfig.of(args))
        body.start()
        return DataBufferClient(LocalActor(body))

    return make


def test_a_rollout_function_reaches_every_public_method_of_the_users_source(client):
    source = client(f"{__file__}:OfFlatSamples")
    assert source.raise_level(2, twice=True) == 7
    assert source.level == 7
    assert not hasattr(source, "lower_level")
    with pytest.raises(AttributeError, match=r"no 'lower_level' in the data source OfFlatSamples .*raise_level"):
        source.lower_level()
    with pytest.raises(AttributeError):
        _ = source._source


def test_the_buffer_of_the_default_source_can_be_measured_and_clients_travel(client, tiny_task):
    path = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    source = client(path, prompt_data=tiny_task.train, hf_checkpoint=tiny_task.model)
    source.add_samples(source.get_samples(2))
    assert source.get_buffer_length() == 2
    assert copy.copy(source).get_buffer_length() == 2


def test_samples_of_a_source_that_counts_nothing_become_numbered_groups(client):
    source = client(f"{__file__}:OfFlatSamples")
    groups = source.get_samples(2) + source.get_samples(1)
    assert [[(s.group_index, s.index, s.prompt) for s in group] for group in groups] == [
        [(0, 0, "p0"), (0, 1, "p0")],
        [(1, 2, "p1"), (1, 3, "p1")],
        [(2, 4, "p0"), (2, 5, "p0")],
    ]
    source.add_samples(groups[:1])
    source.save(0)
    source.load(0)
    assert (len(source), source.get_metadata()) == (0, {})


def test_a_start_with_changed_data_that_was_accepted_is_in_the_ledger(tmp_path: Path, tiny_task):
    rows = Path(tiny_task.train).read_text().splitlines(keepends=True)
    prompts = tmp_path / "rows.jsonl"

    def start(**values: Any) -> DataBuffer:
        places = {"prompt_data": str(prompts), "save": str(tmp_path), "load": str(tmp_path)}
        args = make_args(tiny_task.model, 0, heartbeat_timeout=0, apply_chat_template=True, **places, **values)
        made = DataBuffer(RunConfig.of(args), tmp_path / LEDGER)
        made.start()
        return made

    prompts.write_text("".join(rows))
    first = start()
    first.begin(0)
    first.settle(0, numbers(first.get_samples(2)), keeps_others=False)
    first.trained(0)
    first.save(0)
    start().begin(1)
    assert audit(read_ledger(tmp_path / LEDGER)[0]).is_clean
    prompts.write_text("".join(rows[:-1]))
    with pytest.raises(DataError, match="content of --prompt-data"):
        start().begin(1)
    start(accept_changed_data=True).begin(1)
    (reason,) = audit(read_ledger(tmp_path / LEDGER)[0]).unknown
    assert reason.startswith("rollout 1: --accept-changed-data: since the checkpoint the content of --prompt-data")


class Uncounted(CountingSource):
    """Keeps its position itself, and numbers nothing."""

    def get_samples(self, num_samples: int) -> list[Any]:
        return [[Sample(prompt=f"p{i}"), Sample(prompt=f"p{i}")] for i in range(num_samples)]


def test_numbers_of_a_source_that_does_not_count_continue_after_a_restart(tmp_path: Path):
    path = f"{__file__}:Uncounted"
    args = Namespace(data_source_path=path, save=str(tmp_path), load=str(tmp_path), heartbeat_timeout=0)
    seen = []
    for rollout_id in range(2):
        actor = DataBuffer(RunConfig.of(args), tmp_path / "rollout" / LEDGER)
        actor.start()
        actor.begin(rollout_id)
        groups = actor.get_samples(2)
        seen += [(sample.group_index, sample.index) for group in groups for sample in group]
        actor.settle(rollout_id, numbers(groups), keeps_others=False)
        actor.save(rollout_id)
        actor.trained(rollout_id)
    assert seen == [(i // 2, i) for i in range(8)]
    assert not audit(read_ledger(tmp_path / "rollout" / LEDGER)[0]).twice
