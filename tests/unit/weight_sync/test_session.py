"""The order of a weight update, and that it always ends with engines that run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slime.utils.errors import EngineError, EngineSilent
from slime.weight_sync.chunks import WeightChunk, into_chunks
from slime.weight_sync.session import TrainerRanks, WeightUpdate, load_files, push_weights
from tests.unit.weight_sync.fakes import RecordingFleet, RecordingSender

WEIGHTS = [("w", torch.arange(6.0)), ("v", torch.ones(2))]
UPDATE = WeightUpdate(version="7", max_chunk_bytes=1 << 20, timeout_s=600)
ORDER = [
    "pause_generation",
    "begin_weight_update",
    "send",
    "finish",
    "end_weight_update",
    "flush_cache",
    "weight_version",
    "continue_generation",
]
FILE_ORDER = [
    "pause_generation",
    "flush_cache",
    "update_weights_from_disk",
    "flush_cache",
    "weight_version",
    "continue_generation",
]


def test_an_update_pauses_sends_flushes_verifies_and_continues_in_that_order():
    fleet = RecordingFleet()
    num_bytes = push_weights(fleet, RecordingSender(fleet), WEIGHTS, UPDATE)
    assert num_bytes == 32
    assert fleet.verbs == ORDER


def test_files_are_loaded_between_pause_and_continue():
    fleet = RecordingFleet()
    load_files(fleet, "/weights", UPDATE)
    assert fleet.verbs == FILE_ORDER
    assert fleet.calls[2][1] == {"model_path": "/weights", "weight_version": "7"}


def test_engines_stay_paused_after_a_success_when_somebody_else_lets_them_go_on():
    fleet = RecordingFleet()
    push_weights(fleet, RecordingSender(fleet), WEIGHTS, replace(UPDATE, continues=False))
    assert fleet.verbs == ORDER[:-1]


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize("failing", ["pause_generation", "begin_weight_update", "end_weight_update", "flush_cache"])
def test_engines_continue_whatever_step_fails(failing: str, continues: bool):
    fleet = RecordingFleet(**{failing: EngineError("no")})
    with pytest.raises(EngineError):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, replace(UPDATE, continues=continues))
    assert fleet.verbs[-1] == "continue_generation"


@pytest.mark.parametrize("failing", ["pause_generation", "flush_cache", "update_weights_from_disk", "weight_version"])
def test_engines_continue_whatever_step_fails_with_files(failing: str):
    fleet = RecordingFleet(**{failing: EngineError("no")})
    with pytest.raises(EngineError):
        load_files(fleet, "/weights", UPDATE)
    assert fleet.verbs[-1] == "continue_generation"


def test_engines_that_have_begun_end_when_another_could_not_begin():
    fleet = RecordingFleet(begin_weight_update=EngineError("silent"))
    with pytest.raises(EngineError, match="silent"):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, replace(UPDATE, comes_again=True))
    assert fleet.verbs == ["pause_generation", "begin_weight_update", "end_weight_update"]


def test_engines_stay_paused_after_a_failure_when_the_update_comes_again():
    fleet = RecordingFleet(flush_cache=EngineError("no"))
    with pytest.raises(EngineError):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, replace(UPDATE, comes_again=True))
    assert "continue_generation" not in fleet.verbs


@pytest.mark.parametrize("fails_in", ["send", "finish"])
def test_a_failed_send_closes_the_session_before_engines_continue(fails_in: str):
    fleet = RecordingFleet()
    with pytest.raises(EngineError, match="lost"):
        push_weights(fleet, RecordingSender(fleet, EngineError("lost"), fails_in=fails_in), WEIGHTS, UPDATE)
    assert fleet.verbs[-2:] == ["end_weight_update", "continue_generation"]


@pytest.mark.parametrize("dead", ["send", "finish"])
def test_the_first_failure_of_a_dying_engine_is_what_is_raised(dead: str):
    gone = EngineError("engine a is gone")
    fleet = RecordingFleet(end_weight_update=gone, continue_generation=gone)
    with pytest.raises(EngineError, match="scheduler died of the shape"):
        push_weights(
            fleet, RecordingSender(fleet, EngineError("scheduler died of the shape"), fails_in=dead), WEIGHTS, UPDATE
        )
    assert fleet.verbs[-2:] == ["end_weight_update", "continue_generation"]


def test_a_rank_that_failed_to_send_gathers_to_the_end_and_sends_no_more():
    fleet, gathered = RecordingFleet(), []

    def weights():
        for name in "abc":
            gathered.append(name)
            yield name, torch.ones(4)

    with pytest.raises(EngineError, match="lost"):
        push_weights(fleet, RecordingSender(fleet, EngineError("lost")), weights(), replace(UPDATE, max_chunk_bytes=16))
    assert gathered == ["a", "b", "c"]
    assert fleet.verbs.count("send") == 1
    assert "finish" not in fleet.verbs


class OtherRank(TrainerRanks):
    """A rank whose neighbor is made up: the test sets its answers."""

    def __init__(self, rank: int, *said: Any) -> None:
        super().__init__(rank, 2, timeout_s=1.0)
        self.said = list(said)

    def agree(self, problem: str | None) -> list[str]:
        return [one for one in (problem, self.said.pop(0)) if one is not None]

    def from_source(self, value: Any) -> Any:
        return value if self.is_source else (None, self.said.pop(0))


def test_what_another_rank_could_not_send_is_an_error_of_the_source_and_the_session_is_closed():
    fleet = RecordingFleet()
    with pytest.raises(EngineError, match="no memory"):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, UPDATE, OtherRank(0, "no memory"))
    assert fleet.verbs[-2:] == ["end_weight_update", "continue_generation"]


def test_a_rank_that_is_not_the_source_only_sends():
    fleet = RecordingFleet()
    assert push_weights(fleet, RecordingSender(fleet), WEIGHTS, UPDATE, OtherRank(1, None, None, None)) == 0
    assert fleet.verbs == ["send", "finish"]


def test_nothing_is_gathered_or_sent_when_the_source_could_not_begin():
    fleet = RecordingFleet()
    silent = EngineSilent("engine a is gone", ["http://a"])
    with pytest.raises(EngineSilent, match="engine a is gone"):
        push_weights(fleet, RecordingSender(fleet), iter([]), UPDATE, OtherRank(1, silent))
    assert fleet.verbs == []


def test_an_engine_with_another_version_is_an_error_that_names_it():
    fleet = RecordingFleet(weight_version="6")
    with pytest.raises(EngineError, match="http://a reports weight version '6' after an update to '7'"):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, UPDATE)


def test_engines_that_do_not_hold_their_checkpoint_again_are_an_error():
    fleet = RecordingFleet(compare_weights=EngineError("engine a refused weights_checker"))
    with pytest.raises(EngineError, match=r"--check-weight-update-equal: .* checkpoint .* engine a refused"):
        push_weights(fleet, RecordingSender(fleet), WEIGHTS, replace(UPDATE, restores=True))
    assert fleet.verbs[-1] == "continue_generation"


def test_chunks_keep_order_respect_the_limit_and_let_a_large_tensor_travel_alone():
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate([2, 2, 10, 1, 1])]
    chunks = list(into_chunks(tensors, max_bytes=16))
    assert [[name for name, _ in chunk.tensors] for chunk in chunks] == [["0", "1"], ["2"], ["3", "4"]]


@pytest.mark.parametrize("given", [False, True])
def test_the_flat_bytes_of_a_chunk_are_the_bytes_of_its_tensors(given: bool):
    tensors = [("a", torch.randn(3, 2)), ("b", torch.randn(4).view(2, 2).t()), ("c", torch.tensor(2.0))]
    out = torch.zeros(44, dtype=torch.uint8) if given else None
    flat = WeightChunk(tensors).flatten(out)
    assert out is None or flat is out
    assert torch.equal(flat[:24].view(torch.float32), tensors[0][1].flatten())
    assert torch.equal(flat[24:40].view(torch.float32), tensors[1][1].contiguous().flatten())
    assert flat[40:].view(torch.float32).item() == 2.0
