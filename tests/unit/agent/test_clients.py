"""The real clients of OpenAI and Anthropic against the adapters. A client checks each answer against its types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from tests.unit.agent.test_adapters import CALL, END, TOOL, Agent

THINKS = "<think>hm</think>"
LOOK = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}}
CALLED = {"a": "1", "b": "2"}


class Clients:
    """An engine with prepared replies, an adapter, and both clients. The session's id is the API key."""

    def __init__(self, kind: type, replies: list[Any]) -> None:
        self.agent = Agent(kind, replies)
        url = f"http://127.0.0.1:{self.agent.handle.port}"
        options: dict[str, Any] = {"api_key": "s", "max_retries": 0, "_strict_response_validation": True}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **options)
        self.anthropic = anthropic.Anthropic(base_url=url, **options)
        self.agent.adapter.open_session("s")

    def sent(self, number: int) -> str:
        """The prompt of a request, as text."""
        return "".join(map(chr, self.agent.engine.requests[number]["input_ids"]))


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Clients] = []

    def build(kind: type, replies: list[Any]) -> Clients:
        made.append(Clients(kind, replies))
        return made[-1]

    yield build
    for clients in made:
        clients.agent.close()


def test_a_response_has_reasoning_text_and_calls_and_another_continues_it_by_its_id(make):
    clients = make(OpenAIAdapter, [f"{THINKS}see{CALL}{CALL}{END}", "4" + END])
    create = clients.openai.responses.create
    first = create(model="m", input="q", instructions="sys", tools=[LOOK], max_output_tokens=9)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    thoughts, text, call, _ = first.output
    assert (thoughts.content[0].text, text.content[0].text) == ("hm", "see")
    assert (call.name, call.arguments) == ("look", '{"b": "2", "a": "1"}')
    assert (first.status, first.output_text, first.model, first.max_output_tokens) == ("completed", "see", "m", 9)
    assert clients.sent(0) == f"s:sys{END}u:q{END}a:"
    assert clients.agent.engine.requests[0]["sampling_params"]["max_new_tokens"] == 9
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"seen {number}"}
        for number, item in enumerate(first.output[2:])
    ]
    again = create(model="m", input=results, instructions="other", previous_response_id=first.id)
    assert again.previous_response_id == first.id
    called = '{"name": "look", "arguments": {"b": "2", "a": "1"}}' * 2
    assert clients.sent(1) == f"s:other{END}u:q{END}a:see{called}{END}t:seen 0{END}t:seen 1{END}a:"
    assert again.usage.total_tokens == len(clients.sent(1)) + 2


def test_a_conversation_that_is_sent_as_items_is_the_one_that_its_id_names(make):
    clients = make(OpenAIAdapter, [f"{THINKS}see{CALL}{END}", "4" + END, "5" + END])
    create = clients.openai.responses.create
    question = {"role": "user", "content": [{"type": "input_text", "text": "q"}]}
    first = create(model="m", input=[question], tools=[LOOK])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "seen"}
    create(model="m", input=[result], previous_response_id=first.id, tools=[LOOK])
    items = [item.model_dump(exclude_none=True) for item in first.output]
    create(model="m", input=[question, *items, result], tools=[LOOK])
    assert clients.sent(1) == clients.sent(2)
    samples = clients.agent.finish()
    assert [sample.tokens[-2:] for sample in samples] == [[ord("4"), ord(END)], [ord("5"), ord(END)]]
    assert {len(sample.tokens) for sample in samples} == {len(clients.sent(1)) + 2}


def test_a_streamed_response_adds_up_to_the_whole_one(make):
    clients = make(OpenAIAdapter, [f"{THINKS}see{CALL}{END}"])
    with clients.openai.responses.stream(model="m", input="q", tools=[LOOK]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = {event.type: event.delta for event in events if event.type.endswith(".delta")}
    assert deltas == {
        "response.reasoning_text.delta": "hm",
        "response.output_text.delta": "see",
        "response.function_call_arguments.delta": '{"b": "2", "a": "1"}',
    }
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert (events[0].type, events[0].response.output) == ("response.created", [])
    assert events[-1].type == "response.completed"


def test_a_response_that_was_cut_off_is_incomplete_whole_and_as_a_stream(make):
    clients = make(OpenAIAdapter, [("on", "length")] * 2)
    whole = clients.openai.responses.create(model="m", input="q")
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = clients.openai.responses.create(model="m", input="q", stream=True)
    assert (last.type, last.response.status, last.response.output_text) == ("response.incomplete", "incomplete", "on")


@pytest.mark.parametrize(
    ("request_of", "problem"),
    [
        ({"input": "q", "previous_response_id": "resp_x"}, "'resp_x' is not a response of this session"),
        ({"input": "q", "previous_response_id": ["resp_x"]}, r"\['resp_x'\] is not a response of this session"),
        ({"input": "q", "tools": [1]}, "tools must be a list of objects"),
        ({"input": "q", "tools": "search"}, "tools must be a list of objects"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of type 'item_reference'"),
        ({"input": [{"role": "critic", "content": "x"}]}, "role 'critic'"),
        ({}, "input must be a text or a list of items"),
    ],
)
def test_a_request_for_a_response_that_cannot_be_made_is_refused_with_the_cause(make, request_of, problem):
    clients = make(OpenAIAdapter, [])
    with pytest.raises(openai.BadRequestError, match=problem):
        clients.openai.responses.create(model="m", **request_of)


def test_a_response_is_no_predecessor_in_another_session(make):
    clients = make(OpenAIAdapter, ["a" + END])
    first = clients.openai.responses.create(model="m", input="q")
    other = clients.openai.with_options(api_key="t")
    with pytest.raises(openai.BadRequestError, match="of this session"):
        other.responses.create(model="m", input="r", previous_response_id=first.id)


def test_chat_completions_whole_and_as_a_stream(make):
    clients = make(OpenAIAdapter, [THINKS + CALL + END, THINKS + CALL + END, "so" + END])
    create = clients.openai.chat.completions.create
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
    (choice,) = create(**ask, tools=[TOOL]).choices
    assert (choice.finish_reason, choice.message.tool_calls[0].function.name) == ("tool_calls", "look")
    with clients.openai.chat.completions.stream(**ask, tools=[TOOL]) as stream:
        (final,) = stream.get_final_completion().choices
    assert final.message.tool_calls[0].function.arguments == choice.message.tool_calls[0].function.arguments
    assert "".join(chunk.choices[0].delta.content or "" for chunk in create(**ask, stream=True)) == "so"


def test_anthropic_messages_whole_and_as_a_stream(make):
    clients = make(AnthropicAdapter, [f"{THINKS}see{CALL}{END}"] * 2)
    ask: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    whole = clients.anthropic.messages.create(**ask)
    with clients.anthropic.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert (message.content[2].input, message.stop_reason) == (CALLED, "tool_use")
    assert streamed.usage.output_tokens == whole.usage.output_tokens
