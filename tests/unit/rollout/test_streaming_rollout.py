"""Generation as a stream equals generation in one reply, and keeps what came when the rollout ends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.data.engine_fields import OUTPUT_LISTS
from slime.data.sample import Sample
from slime.hooks import check_hooks
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.utils.async_utils import run
from slime.utils.errors import DeadlineExceeded, EngineError
from tests.limits import unloaded_time
from tests.unit.rollout.fake_engine import FakeEngine, completion, make_args

PATH = "slime.rollout.sglang_streaming_rollout.generate_streaming"
PARAMS = {"temperature": 1.0, "max_new_tokens": 8}


@pytest.fixture
def serve(engine: Callable[..., FakeEngine], tiny_task: Any) -> Callable[..., Any]:
    """``serve(on_generate, **flags)`` -> (engine, args)."""

    def start(on_generate: Any, **flags: Any) -> tuple[FakeEngine, Any]:
        server = engine(on_generate)
        return server, make_args(tiny_task.model, server.port, **flags)

    return start


def events(payload: dict[str, Any], ids: list[int], *, text: str = "7") -> list[dict[str, Any]]:
    """The engine's response so far after each token. Only the last one has a finish reason."""
    made = []
    for count in range(1, len(ids) + 1):
        event = completion(payload, ids[:count], text=text * count)
        if count < len(ids):
            event["meta_info"]["finish_reason"] = None
        made.append(event)
    return made


def both(payload: dict[str, Any], number: int) -> tuple[int, Any]:
    whole = completion(payload, [5, 6, 7], "length", "777")
    if not payload.get("stream"):
        return 200, whole
    stream: list[Any] = [*events(payload, [5, 6, 7])[:2], b"data: not json\n\n", b": comment\n\n", whole]
    return 200, iter([*stream, b"data: [DONE]\n\n", {"after": "the end"}])


def visible(sample: Sample) -> dict[str, Any]:
    return {name: value for name, value in vars(sample).items() if name not in ("session_id", "trace")}


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_stream_and_one_reply_make_the_same_sample(serve: Any, is_continued: bool) -> None:
    engine, args = serve(both)
    first = Sample(index=3, prompt="1+1=")
    if is_continued:
        first.tokens = [4, 9]
        first.append_response_tokens(tokens=[8], log_probs=[-0.5], text="8")
        first.status = Sample.Status.ABORTED
    second = copy.deepcopy(first)
    run(generate(args, first, dict(PARAMS)))
    params = dict(PARAMS)
    run(generate_streaming(args, second, params))
    assert visible(second) == visible(first)
    assert second.response == ("8777" if is_continued else "777")
    assert second.status is Sample.Status.TRUNCATED
    assert params == PARAMS
    one, other = engine.requests
    assert other.pop("stream") is True
    assert one.pop("rid") != other.pop("rid")
    assert one == other


def test_a_stream_that_is_refused_as_a_copy_is_repeated(serve: Any) -> None:
    def refuse_once(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        refusal = {"error": {"message": f"Duplicate request ID detected: {payload['rid']}", "code": 400}}
        return (200, iter([refusal])) if number == 0 else both(payload, number)

    engine, args = serve(refuse_once)
    sample = Sample(index=3, prompt="1+1=")
    run(generate_streaming(args, sample, dict(PARAMS)))
    assert sample.response == "777"
    assert engine.aborts == [{"rid": engine.requests[0]["rid"]}]


def test_an_aborted_rollout_keeps_what_came_and_the_engine_is_left(serve: Any) -> None:
    def endless(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        def tokens() -> Iterator[Any]:
            yield events(payload, [5, 6, 7, 8])[2]
            deadline = unloaded_time() + 10
            while unloaded_time() < deadline:  # until the reader is gone
                yield b": still here\n\n" * 1000

        return 200, tokens()

    engine, args = serve(endless)
    sample = Sample(index=0, prompt="1+1=")
    GenerateState(args).aborted = True
    run(generate_streaming(args, sample, dict(PARAMS)))
    assert sample.status is Sample.Status.ABORTED
    assert sample.tokens[-3:] == [5, 6, 7]
    assert (sample.response_length, sample.response) == (3, "777")
    assert sample.rollout_log_probs == [-0.1, -0.2, -0.3]
    assert sample.weight_versions == ["3"], "the tokens may be trained"
    assert engine.disconnected.wait(120)


def test_an_aborted_request_of_an_engine_ends_the_sample_too(serve: Any) -> None:
    _, args = serve(lambda payload, number: (200, iter([completion(payload, [5], "abort")])))
    sample = run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS)))
    assert sample.status is Sample.Status.ABORTED
    assert sample.weight_versions == ["3"]


def test_a_stream_that_breaks_off_is_generated_anew_from_the_prompt(serve: Any, tmp_path: Any, tiny_task: Any) -> None:
    def breaks(payload: dict[str, Any]) -> Iterator[Any]:
        yield from events(payload, [5, 6, 7])[:1]
        raise ConnectionAbortedError

    def reply(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 0:
            return 200, breaks(payload)
        return 200, iter(events(payload, [6, 7]))

    _, args = serve(
        reply,
        prompt_data=tiny_task.train,
        apply_chat_template=True,
        custom_generate_function_path=PATH,
        max_sample_retries=1,
    )
    assert check_hooks(args) == []
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    samples = [sample for group in output.samples for sample in group]
    assert [sample.tokens[-2:] for sample in samples] == [[6, 7]] * 4
    assert [sample.response_length for sample in samples] == [2] * 4
    assert sum(sample.metadata.get("failed_attempts", 0) for sample in samples) == 1


def test_an_end_without_a_finish_reason_is_no_answer(serve: Any) -> None:
    _, args = serve(lambda payload, number: (200, iter(events(payload, [5, 6])[:1])))
    sample = Sample(prompt="1+1=")
    with pytest.raises(ConnectionError, match="before the engine finished"):
        run(generate_streaming(args, sample, dict(PARAMS)))
    assert sample.response_length == 0


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(serve: Any) -> None:
    engine, args = serve(
        lambda payload, number: (200, iter(events(payload, [5]))) if number else (503, {"error": "no worker"})
    )
    assert run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS))).response_length == 1
    assert len(engine.requests) == 2
    engine, args = serve(lambda payload, number: (400, {"error": "too long"}))
    with pytest.raises(EngineError, match="too long"):
        run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS)))
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("event", "message"),
    [({"error": {"message": "bad"}}, "refused sample"), ([1], "not that of an SGLang server")],
)
def test_events_of_another_kind_are_named(serve: Any, event: Any, message: str) -> None:
    _, args = serve(lambda payload, number: (200, iter([event])))
    with pytest.raises(EngineError, match=message):
        run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS)))


def with_sets(event: dict[str, Any]) -> dict[str, Any]:
    tokens = [item[1] for item in event["meta_info"]["output_token_logprobs"]]
    event["meta_info"]["output_token_sampling_mask"] = [[token, 1] for token in tokens]
    event["meta_info"]["output_token_sampling_logprobs"] = [-token / 100 for token in tokens]
    return event


def only_new(whole: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events ``whole`` as ``--sglang-incremental-streaming-output`` sends them."""
    for number, event in enumerate(whole):
        new = copy.deepcopy(event)
        new["text"] = event["text"][number:]
        for key in OUTPUT_LISTS:
            if key in event["meta_info"]:
                new["meta_info"][key] = event["meta_info"][key][number:]
        yield new


@pytest.mark.parametrize("flags", [{}, {"rollout_top_p": 0.9}])
def test_events_that_hold_only_what_is_new_make_the_same_sample(serve: Any, flags: dict[str, Any]) -> None:
    def reply(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        whole = events(payload, [5, 6, 7])
        if flags:
            whole = [with_sets(event) for event in whole]
        return 200, iter(whole if number == 0 else only_new(whole))

    _, args = serve(reply, **flags)
    first, second = (run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS))) for _ in range(2))
    assert first.tokens[-3:] == second.tokens[-3:] == [5, 6, 7]
    assert first.response == second.response == "777"
    assert first.rollout_log_probs == second.rollout_log_probs
    if flags:
        assert second.rollout_top_p_token_ids.tolist() == first.rollout_top_p_token_ids.tolist() == [5, 1, 6, 1, 7, 1]
        assert second.rollout_top_p_token_offsets.tolist() == [0, 2, 4, 6]


def test_an_abort_without_the_sets_of_its_tokens_leaves_those_that_came_with_theirs(serve: Any) -> None:
    def reply(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        begun = [with_sets(event) for event in events(payload, [5, 6, 7])[:2]]
        return 200, iter([*only_new(begun), completion(payload, [5, 6], "abort", text="77")])

    _, args = serve(reply, rollout_top_p=0.9)
    sample = run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS)))
    assert (sample.status, sample.tokens[-2:], sample.response) == (Sample.Status.ABORTED, [5, 6], "77")
    assert sample.rollout_top_p_token_ids.tolist() == [5, 1, 6, 1]


def test_a_stream_that_lacks_an_event_is_refused(serve: Any) -> None:
    def reply(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        first, _, third = only_new(events(payload, [5, 6, 7]))
        return 200, iter([first, third])

    _, args = serve(reply)
    with pytest.raises(EngineError, match="holds 1 tokens after 1, of 3 in all"):
        run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS)))


def test_a_stream_that_stalls_ends_at_the_deadline(serve: Any) -> None:
    def stalls(payload: dict[str, Any]) -> Iterator[Any]:
        yield events(payload, [5, 6])[0]
        engine.aborted.wait(120)

    engine, args = serve(lambda payload, number: (200, stalls(payload)), rollout_request_timeout=0.3)
    with pytest.raises(DeadlineExceeded):
        run(generate_streaming(args, Sample(prompt="1+1="), dict(PARAMS)))
