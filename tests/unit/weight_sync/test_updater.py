"""Which way each engine gets its weights, the state of connections, and the data that is sent only once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slime.backends import EVERY_RANK, SOURCE, EngineInfo, NamedTensor, Recipients
from slime.utils import accelerator
from slime.utils.errors import EngineError
from slime.utils.net import claim_ports
from slime.weight_sync import updater as updater_module
from slime.weight_sync.session import TrainerRanks, WeightUpdate
from slime.weight_sync.updater import WeightUpdater
from tests.unit.weight_sync.fakes import RecordingFleet, RecordingSender, StubTrainer

UPDATE = WeightUpdate("1", max_chunk_bytes=1 << 20, timeout_s=600)


class Network(RecordingSender):
    """Stands for the process group, which needs engines that join it."""

    made: list[Network]
    connect_error: Exception | None = None

    def __init__(self, fleet: RecordingFleet, *, group_name: str, timeout_s: float) -> None:
        super().__init__(fleet)
        self.urls = [engine.url for engine in fleet.engines]
        self.group_name = group_name
        self.made.append(self)

    def connect(self, address: str, port: int) -> None:
        self.fleet.verbs.append("connect")
        self.next_claim = claim_ports(address, start=port).first
        self.port = port
        if self.connect_error is not None:
            raise self.connect_error


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> type[Network]:
    monkeypatch.setattr(updater_module, "DistributedSender", Network)
    Network.made, Network.connect_error = [], None
    return Network


def _updater(*, shares_devices: bool = False, **more: Any) -> WeightUpdater:
    ranks = TrainerRanks(0, 1, timeout_s=600)
    return WeightUpdater(ranks, address="127.0.0.1", shares_devices=shares_devices, timeout_s=600, **more)


def _fleet(*engines: EngineInfo, **answers: Any) -> RecordingFleet:
    fleet = RecordingFleet(engines or None, **answers)
    fleet.answers["weight_version"] = lambda: fleet.version
    return fleet


def test_engines_on_the_trainers_devices_get_memory_and_all_others_the_network(network):
    near, beyond, elsewhere = EngineInfo("near", 1, 0), EngineInfo("beyond", 1, 1), EngineInfo("elsewhere", 1)
    fleet = _fleet(near, beyond, elsewhere)
    fleet.version = "1"
    _updater(shares_devices=True).update(fleet, StubTrainer(), UPDATE)
    assert [sender.urls for sender in network.made] == [["beyond", "elsewhere"]]
    assert fleet.verbs.count("update_weights_from_tensor") == 1
    assert fleet.verbs.count("pause_generation") == 1


def test_engines_with_devices_of_their_own_never_get_memory(network):
    fleet = _fleet(EngineInfo("a", 1, 0))
    fleet.version = "1"
    _updater().update(fleet, StubTrainer(), UPDATE)
    assert [sender.urls for sender in network.made] == [["a"]]
    assert "update_weights_from_tensor" not in fleet.verbs


def test_the_port_of_a_group_is_claimed_until_it_is_formed(network):
    fleet = _fleet()
    fleet.version = "1"
    _updater().update(fleet, StubTrainer(), UPDATE)
    (made,) = network.made
    assert made.next_claim > made.port
    assert claim_ports("127.0.0.1", start=made.port).first == made.port


def test_connections_are_kept_for_the_same_engines_and_made_anew_for_others(network):
    updater, trainer = _updater(), StubTrainer()
    fleet, other = _fleet(), _fleet()
    for each, version in ((fleet, "1"), (fleet, "2"), (other, "3")):
        each.version = version
        updater.update(each, trainer, replace(UPDATE, version=version))
    assert len(network.made) == 2
    assert fleet.verbs[-1] == "disconnect"
    assert network.made[0].group_name != network.made[1].group_name


@pytest.mark.parametrize("failing", ["pause_generation", "begin_weight_update", "end_weight_update", "flush_cache"])
def test_after_a_failure_the_next_update_connects_anew(network, failing):
    updater, trainer, fleet = _updater(), StubTrainer(), _fleet(**{failing: EngineError("no")})
    with pytest.raises(EngineError, match="no"):
        updater.update(fleet, trainer, UPDATE)
    fleet.answers.pop(failing)
    fleet.version = "1"
    updater.update(fleet, trainer, UPDATE)
    assert len(network.made) == 2


def test_engines_that_cannot_connect_are_not_paused(network):
    network.connect_error = EngineError("engine a is gone")
    fleet = _fleet()
    with pytest.raises(EngineError, match="engine a is gone"):
        _updater().update(fleet, StubTrainer(), UPDATE)
    assert fleet.verbs == ["connect", "disconnect"]


def _sent(network: type[Network]) -> list[str]:
    names = [name for chunk, _ in network.made[-1].sent for name, _ in chunk.tensors]
    network.made[-1].sent.clear()
    return names


def test_tensors_that_have_not_changed_are_left_out_when_asked(network):
    updater, trainer, fleet = _updater(changed_only=True), StubTrainer(), _fleet()
    names = list(trainer.weights)

    def sync(version: str) -> list[str]:
        fleet.version = version
        updater.update(fleet, trainer, replace(UPDATE, version=version))
        return _sent(network)

    assert sync("1") == names
    trainer.step(names[2])
    assert sync("2") == [names[0], names[2]], "the first carries the version"
    assert sync("3") == [names[0]]
    fleet.answers["end_weight_update"] = EngineError("no")
    trainer.step(names[1])
    with pytest.raises(EngineError):
        sync("4")
    fleet.answers.pop("end_weight_update")
    assert sync("4") == names, "the engines may hold anything"


def test_everything_is_sent_every_time_when_nothing_else_is_asked_for(network):
    updater, trainer, fleet = _updater(), StubTrainer(), _fleet()
    for version in ("1", "2"):
        fleet.version = version
        updater.update(fleet, trainer, replace(UPDATE, version=version))
        assert _sent(network) == list(trainer.weights)


@pytest.mark.parametrize(
    ("free_gib", "bucket"), [(None, 512 << 20), (1, 512 << 20), (8, 1 << 30), (16, 2 << 30), (100, 2 << 30)]
)
def test_a_bucket_is_an_eighth_of_the_free_memory_unless_the_flag_gives_its_size(
    network: type[Network], monkeypatch: pytest.MonkeyPatch, free_gib: int | None, bucket: int
) -> None:
    free = None if free_gib is None else free_gib << 30
    monkeypatch.setattr(accelerator.current(), "free_memory", lambda: free)
    asked: list[int] = []

    class Weights(StubTrainer):
        def export_weights(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
            asked.append(bucket_bytes)
            assert recipients == SOURCE
            return super().export_weights()

    fleet = _fleet()
    fleet.version = "1"
    for size in (None, 4096):
        _updater().update(fleet, Weights(), replace(UPDATE, max_chunk_bytes=size))
    assert asked == [bucket, 4096]


def test_ranks_get_the_experts_of_their_engines_devices_and_ranks_without_an_engine_get_none() -> None:
    updater = WeightUpdater(TrainerRanks(0, 7, timeout_s=600), address="", shares_devices=True, timeout_s=600)
    wide, narrow = EngineInfo("wide", 4, first_slot=0, expert_blocks=2), EngineInfo("narrow", 2, first_slot=4)
    found = updater.recipients([wide, narrow])
    assert found.blocks == ((0, 2), (0, 2), (1, 2), (1, 2), (0, 1), (0, 1), None)
    assert [list(found.experts(rank, 4)) for rank in (0, 2, 4, 6)] == [[0, 1], [2, 3], [0, 1, 2, 3], []]
    far = EngineInfo("far", 4)
    assert updater.recipients([narrow]) == EVERY_RANK
    assert updater.recipients([wide, far]) == EVERY_RANK, "rank 0 broadcasts all experts"
    assert updater.recipients([far]) == SOURCE
