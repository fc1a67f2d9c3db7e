"""The order of a weight update, and that it always ends with engines that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from slime.backends.protocols import EngineInfo
from slime.utils.errors import EngineError
from slime.weight_sync.chunks import WeightChunk, into_chunks
from slime.weight_sync.session import WeightUpdate, push_weights


class Done:
    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def wait(self, timeout_s: float) -> list[Any]:
        for result in self.results:
            if isinstance(result, Exception):
                raise result
        return self.results


class RecordingFleet:
    """Two engines that note every verb; answers can be replaced to inject a fault."""

    engines: Sequence[EngineInfo] = (EngineInfo("http://a", 1), EngineInfo("http://b", 1))

    def __init__(self, **answers: Any) -> None:
        self.verbs: list[str] = []
        self.answers = {"weight_version": "7", "weights_checksum": {"w": "sum"}} | answers

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> Done:
        self.verbs.append(verb)
        return Done([self.answers.get(verb)] * 2)


class RecordingSender:
    def __init__(self, fleet: RecordingFleet, error: Exception | None = None) -> None:
        self.fleet, self.error, self.sent = fleet, error, []

    def send(self, chunk: WeightChunk, weight_version: str) -> None:
        self.fleet.verbs.append("send")
        self.sent.append((chunk, weight_version))
        if self.error:
            raise self.error


WEIGHTS = [("w", torch.arange(6.0)), ("v", torch.ones(2))]
UPDATE = WeightUpdate(version="7", max_chunk_bytes=1 << 20, timeout_s=5.0)


def test_an_update_pauses_sends_flushes_verifies_and_continues_in_that_order():
    fleet = RecordingFleet()
    num_bytes = push_weights(fleet, RecordingSender(fleet), WEIGHTS, UPDATE)
    assert num_bytes == 32
    assert fleet.verbs == [
        "pause_generation",
        "begin_weight_update",
        "send",
        "end_weight_update",
        "flush_cache",
        "weight_version",
        "continue_generation",
    ]


@pytest.mark.parametrize("failing", ["pause_generation", "begin_weight_update", "end_weight_update", "flush_cache"])
def test_engines_continue_whatever_step_fails(failing: str):
    fleet = RecordingFleet(**{failing: EngineError("no")})
    with pytest.raises(EngineError):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, UPDATE)
    assert fleet.verbs[-1] == "continue_generation"


def test_a_failed_send_closes_the_session_before_engines_continue():
    fleet = RecordingFleet()
    with pytest.raises(EngineError, match="lost"):
        push_weights(fleet, RecordingSender(fleet, EngineError("lost")), WEIGHTS, UPDATE)
    assert fleet.verbs[-2:] == ["end_weight_update", "continue_generation"]


def test_an_engine_with_another_version_is_an_error_that_names_it():
    fleet = RecordingFleet(weight_version="6")
    with pytest.raises(EngineError, match="http://a reports weight version '6' after an update to '7'"):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, UPDATE)


def test_a_tensor_that_differs_is_named():
    fleet = RecordingFleet()
    update = WeightUpdate("7", 1 << 20, 5.0, checksums=lambda tensors: {name: "other" for name, _ in tensors})
    with pytest.raises(EngineError, match=r"2 of 2 tensors of engine http://a differ .* the first is w"):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, update)


def test_chunks_keep_order_respect_the_limit_and_let_a_large_tensor_travel_alone():
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate([2, 2, 10, 1, 1])]
    chunks = list(into_chunks(tensors, max_bytes=16))
    assert [[name for name, _ in chunk.tensors] for chunk in chunks] == [["0", "1"], ["2"], ["3", "4"]]


def test_a_chunk_never_mixes_dtypes():
    tensors = [("a", torch.zeros(3, dtype=torch.bfloat16)), ("b", torch.zeros(3))]
    assert len(list(into_chunks(tensors, max_bytes=1 << 20))) == 2


def test_the_flat_bytes_of_a_chunk_are_the_bytes_of_its_tensors():
    tensors = [("a", torch.randn(3, 2)), ("b", torch.randn(4).view(2, 2).t())]
    flat = WeightChunk(tensors).flatten()
    assert torch.equal(flat[:24].view(torch.float32), tensors[0][1].flatten())
    assert torch.equal(flat[24:].view(torch.float32), tensors[1][1].contiguous().flatten())
