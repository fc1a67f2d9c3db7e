"""The engine of a replay answers from the record, and reports where a request departs from it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from slime.data.sample import Sample
from slime.replay import Recording
from slime.testing.fakes import serving


class Letters:
    """A tokenizer of one letter per id."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(97 + token) for token in ids)


def recording(**fields: Any) -> Recording:
    """Prompt ab, the model wrote cd, a tool e, the model fg and was cut."""
    sample = Sample(
        tokens=[0, 1, 2, 3, 4, 5, 6],
        response_length=5,
        loss_mask=[1, 1, 0, 1, 1],
        rollout_log_probs=[-1.0, -2.0, 0.0, -3.0, -4.0],
        weight_versions=["7", "8"],
        status=Sample.Status.TRUNCATED,
        **fields,
    )
    return Recording(sample, Letters())


def test_what_a_token_was_sampled_from_is_answered_again() -> None:
    engine = recording(rollout_top_p_token_ids=[2, 9, 3, 5, 8, 6], rollout_top_p_token_offsets=[0, 2, 3, 3, 5, 6])
    turns = [engine.answer({"input_ids": list(range(length))}) for length in (2, 5)]
    assert [turn["meta_info"]["output_token_sampling_mask"] for turn in turns] == [[[2, 9], [3]], [[5, 8], [6]]]


def test_a_request_for_what_comes_next_gets_it() -> None:
    engine = recording()
    first = engine.answer({"input_ids": [0, 1]})
    assert (first["text"], first["output_ids"]) == ("cd", [2, 3])
    assert first["meta_info"]["output_token_logprobs"] == [[-1.0, 2, None], [-2.0, 3, None]]
    assert first["meta_info"]["finish_reason"] == {"type": "stop"}
    assert first["meta_info"]["weight_version"] == "7"
    second = engine.answer({"input_ids": [0, 1, 2, 3, 4]})
    assert second["text"] == "fg"
    assert second["meta_info"]["finish_reason"] == {"type": "length"}
    assert (second["meta_info"]["weight_version"], second["meta_info"]["prompt_tokens"]) == ("8", 5)
    assert (engine.num_turns, engine.num_answered) == (2, 2)


def test_a_request_in_the_middle_of_a_turn_gets_its_rest() -> None:
    assert recording().answer({"input_ids": [0, 1, 2]})["text"] == "d"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 9], "departs from the recording at token 1: it has 9, recorded is 1"),
        ([0, 1, 2, 3, 9], "at token 4: it has 9, recorded is 4"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "recorded is the end"),
        ([0, 1, 2, 3], "after token 4 the model wrote nothing"),
        ([0, 1, 2, 3, 4, 5, 6], "after token 7 the model wrote nothing"),
    ],
)
def test_a_request_that_departs_is_refused_with_its_place(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recording().answer({"input_ids": ids})


def test_requests_of_text_are_answered_in_order() -> None:
    engine = recording()
    assert [engine.answer({"text": "x"})["text"] for _ in range(2)] == ["cd", "fg"]
    with pytest.raises(ValueError, match="has 2 turns"):
        engine.answer({"text": "x"})


def test_it_is_reached_over_http_like_a_router() -> None:
    with (
        serving(recording().answer) as (host, port),
        httpx.Client(base_url=f"http://{host}:{port}", trust_env=False) as client,
    ):
        assert client.post("/generate", json={"input_ids": [0, 1]}).json()["text"] == "cd"
        refused = client.post("/generate", json={"input_ids": [5]})
        assert (refused.status_code, "departs" in refused.text) == (400, True)
        stream = client.post("/generate", json={"input_ids": [0, 1], "stream": True}).text
        event: dict[str, Any] = json.loads(stream.split("\n\n")[0].removeprefix("data: "))
        assert (event["text"], stream.endswith("data: [DONE]\n\n")) == ("cd", True)
        assert client.get("/workers").status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{host}:{port}/workers", trust_env=False)
