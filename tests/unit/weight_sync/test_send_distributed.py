"""Two buckets under way: one is laid out while engines receive another, and never in memory that is being sent."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

from slime.backends import EngineInfo
from slime.utils.errors import DeadlineExceeded, EngineError
from slime.utils.net import WEIGHT_INTERFACES
from slime.weight_sync import send_distributed
from slime.weight_sync.chunks import WeightChunk
from slime.weight_sync.send_distributed import DistributedSender
from tests.unit.weight_sync.fakes import Done, RecordingFleet


class Engines(RecordingFleet):
    """Receive the broadcast when their answer is awaited, not before."""

    def __init__(self, *engines: EngineInfo) -> None:
        super().__init__(engines or None)
        self.log: list[str] = []
        self.on_the_wire: queue.Queue[torch.Tensor] = queue.Queue()
        self.sent: list[torch.Tensor] = []
        self.received: list[bytes] = []
        self.refuses: str | None = None

    def start(self, verb: str, each: Any = None, **kwargs: Any) -> Any:
        super().start(verb, each, **kwargs)
        if each is not None:
            self.calls[-1] = (verb, kwargs | {"each": list(each)})
        return Reply(self, kwargs["names"]) if verb == "update_weights_from_distributed" else Done([None])


class Reply:
    def __init__(self, engines: Engines, names: list[str]) -> None:
        self.engines, self.name = engines, names[0]
        engines.log.append(f"start {self.name}")

    def wait(self, timeout_s: float) -> list[None]:
        if self.engines.refuses == self.name:
            raise EngineError(f"wrong shape of {self.name}")
        self.engines.log.append(f"arrived {self.name}")
        self.engines.received.append(bytes(self.engines.on_the_wire.get(timeout=60).view(-1).view(torch.uint8).numpy()))
        return [None]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines(EngineInfo("a", 1), EngineInfo("b", 2), EngineInfo("c", 1))

    def broadcast(flat: torch.Tensor, **kwargs: Any) -> Done:
        engines.sent.append(flat)
        engines.on_the_wire.put(flat)  # read when it arrives: overwritten memory would show
        return Done([])

    monkeypatch.setattr(send_distributed.dist, "broadcast", broadcast)
    monkeypatch.setattr(send_distributed, "join_group", lambda *more, **kwargs: kwargs)
    monkeypatch.setattr(send_distributed, "destroy_group", lambda group: engines.log.append("destroyed"))
    return engines


def _sender(engines: Engines) -> DistributedSender:
    sender = DistributedSender(engines, group_name="g", timeout_s=600)
    sender.connect("127.0.0.1", 1)
    return sender


def _chunks(*sizes: int) -> list[WeightChunk]:
    values = [torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(sizes)]
    return [WeightChunk([(f"w{index}", value)]) for index, value in enumerate(values)]


def test_engines_of_different_width_get_ranks_one_after_the_other(engines: Engines) -> None:
    sender = _sender(engines)
    verb, call = engines.calls[0]
    assert verb == "init_weights_update_group"
    assert [each["rank_offset"] for each in call["each"]] == [1, 2, 4]
    assert call["world_size"] == 5
    assert sender._group["world_size"] == 5


def test_a_bucket_is_announced_when_the_one_before_has_arrived(engines: Engines) -> None:
    sender = _sender(engines)
    for chunk in _chunks(4, 4, 4):
        sender.send(chunk, "1")
    assert engines.log == ["start w0", "arrived w0", "start w1", "arrived w1", "start w2"]
    sender.finish()
    assert engines.log[-1] == "arrived w2"


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (2, 4, 2, 4), (4, 1, 3, 2, 4)])
def test_every_bucket_arrives_as_it_was(engines: Engines, sizes: tuple[int, ...]) -> None:
    sender = _sender(engines)
    for chunk in _chunks(*sizes):
        sender.send(chunk, "1")
    sender.finish()
    assert engines.received == [bytes([index + 1] * size) for index, size in enumerate(sizes)]


def test_a_refused_bucket_is_an_error_and_leaving_is_possible_afterwards(engines: Engines) -> None:
    sender, (first, second) = _sender(engines), _chunks(4, 4)
    engines.refuses = "w0"
    sender.send(first, "1")
    with pytest.raises(EngineError, match="wrong shape of w0"):
        sender.send(second, "1")
    sender.disconnect()
    assert engines.log == ["start w0", "destroyed"]
    assert engines.verbs[-1] == "destroy_weights_update_group"
    sender.disconnect()
    assert engines.verbs.count("destroy_weights_update_group") == 1


def test_an_engine_that_died_before_it_joined_the_first_broadcast_is_named(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, (chunk,) = _sender(engines), _chunks(4)
    gives_up = threading.Event()
    # As NCCL, which connects the members in the first broadcast.
    monkeypatch.setattr(send_distributed.dist, "broadcast", lambda *args, **kwargs: gives_up.wait(60))
    engines.refuses = "w0"
    sender.send(chunk, "1")
    with pytest.raises(EngineError, match="wrong shape of w0"):
        sender.finish()
    assert not gives_up.is_set()
    gives_up.set()


def test_broadcasts_that_never_begin_are_named_though_the_engines_have_answered(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gives_up = threading.Event()
    sender, (chunk,) = DistributedSender(engines, group_name="g", timeout_s=0.01), _chunks(4)
    monkeypatch.setattr(send_distributed.dist, "broadcast", lambda *args, **kwargs: gives_up.wait(60))
    monkeypatch.setattr(Reply, "wait", lambda reply, timeout_s: [None])
    sender.send(chunk, "1")
    with pytest.raises(DeadlineExceeded, match=r"to a, b, c have not begun within 0.01 s \(--weight-sync-timeout\)"):
        sender.finish()
    gives_up.set()


def test_large_tensors_are_sent_from_where_they_lie(engines: Engines) -> None:
    sender = _sender(engines)
    large = [torch.ones(1 << 19), torch.ones(1 << 20), torch.ones(4)]
    chunk = WeightChunk([(f"w{index}", tensor) for index, tensor in enumerate(large)])
    sender.send(chunk, "1")
    sender.finish()
    assert [part.data_ptr() for part in engines.sent] == [tensor.data_ptr() for tensor in large]
    assert engines.calls[-1][1]["load_format"] is None


def test_a_large_tensor_that_does_not_lie_in_order_arrives_in_order(engines: Engines) -> None:
    sender = _sender(engines)
    turned = torch.arange(1 << 20, dtype=torch.float32).view(2, 1 << 19).t()
    sender.send(WeightChunk([("w0", turned)]), "1")
    sender.finish()
    assert engines.sent[0].is_contiguous()
    assert torch.equal(engines.sent[0], turned)


@pytest.mark.parametrize(
    "tensors",
    [[torch.ones(4)], [torch.ones(4)] * 20, [torch.ones(1 << 20, dtype=torch.float8_e4m3fn), torch.ones(4)]],
)
def test_small_tensors_and_eight_bit_ones_are_sent_as_one_row_of_bytes(
    engines: Engines, tensors: list[torch.Tensor]
) -> None:
    sender = _sender(engines)
    chunk = WeightChunk([(f"w{index}", tensor) for index, tensor in enumerate(tensors)])
    sender.send(chunk, "1")
    sender.finish()
    assert [(part.dtype, part.numel()) for part in engines.sent] == [(torch.uint8, chunk.num_bytes)]
    assert engines.calls[-1][1]["load_format"] == "flattened_bucket"


def test_many_small_tensors_travel_as_one_before_the_large_ones_and_fused_ones_together(engines: Engines) -> None:
    sender = _sender(engines)
    small = [(f"w{index}", torch.full((4,), float(index))) for index in range(20)]
    fused = [("0.q_a_proj.weight", torch.ones(1 << 18)), ("0.kv_a_proj_with_mqa.weight", torch.ones(4))]
    large = [("embed", torch.ones(1 << 19))]
    sender.send(WeightChunk([*small[:10], *large, *fused, *small[10:]]), "1")
    sender.finish()
    calls = [call for verb, call in engines.calls if verb == "update_weights_from_distributed"]
    assert [call["names"] for call in calls] == [[name for name, _ in part] for part in (small, large + fused)]
    assert [call["load_format"] for call in calls] == ["flattened_bucket", None]
    assert engines.log == ["start w0", "arrived w0", "start embed", "arrived embed"]
    assert engines.sent[0].view(torch.float32).tolist() == [value for _, tensor in small for value in tensor.tolist()]
    assert [part.data_ptr() for part in engines.sent[1:]] == [tensor.data_ptr() for _, tensor in large + fused]


@pytest.mark.parametrize(("first_slots", "expected"), [((2, 3), "lo,lo"), ((2, None), None)])
def test_only_engines_of_the_run_itself_are_met_over_several_connections(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, first_slots: tuple[int | None, ...], expected: str | None
) -> None:
    monkeypatch.setenv(WEIGHT_INTERFACES, "lo,lo")
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(send_distributed, "join_group", lambda *more, **kwargs: joined.append(kwargs))
    engines.engines = [EngineInfo(f"e{slot}", 1, first_slot=slot) for slot in first_slots]
    _sender(engines)
    assert joined[0]["interfaces"] == expected
