"""Adapters from the outside: a client with plain HTTP on one end, an engine on the other, samples at the end."""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp.test_utils import make_mocked_request

from slime.agent import service
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, common, wire
from slime.agent.adapters.anthropic import _fold_mid_list_system_into_user
from slime.agent.adapters.anthropic import _translate_messages as from_anthropic
from slime.agent.adapters.common import flatten_content
from slime.agent.adapters.openai import _tools_to_chat_tools
from slime.agent.adapters.openai import _translate_messages as from_openai
from slime.agent.parsing import as_object
from slime.agent.service import AppHandle, run_app_in_thread
from slime.data.sample import Sample
from slime.observability.trace_export import otlp_spans
from slime.observability.trace_utils import bind_trace, trace_span
from slime.utils.async_utils import Slots
from slime.utils.errors import DeadlineExceeded
from tests.unit.rollout.fake_engine import FakeEngine, completion

END = "$"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = "<tool_call><function=look><parameter=b>2</parameter><parameter=a>1</parameter></function></tool_call>"


class Tokenizer:
    """One token per character. A message is its role's first letter, its content, and ``$``."""

    eos_token = END

    def apply_chat_template(self, messages, tools=None, tokenize=True, add_generation_prompt=True):
        def text(message):
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
            return message["role"][0] + ":" + message["content"] + "".join(calls) + END

        return [ord(c) for c in "".join(map(text, messages)) + "a:"]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


class Agent:
    """An adapter, its server, an engine that it calls and a client that calls it."""

    def __init__(self, kind, replies: list[Any], **settings: Any) -> None:
        def on_generate(payload, number):
            reply = replies[number]
            if callable(reply):
                return reply(payload)
            text, reason = reply if isinstance(reply, tuple) else (reply, "stop")
            return 200, completion(payload, [ord(c) for c in text], reason=reason, text=text)

        self.engine = FakeEngine(on_generate)
        self.adapter = kind(tokenizer=Tokenizer(), sglang_url=self.engine.url, **settings)
        self.handle: AppHandle = run_app_in_thread(self.adapter.app, runner_kwargs={"handler_cancellation": True})
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.handle.port}", timeout=600, trust_env=False)

    def chat(self, messages: list[dict], sid: str = "s", **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {sid}"} if sid else {}
        return self.client.post("/v1/chat/completions", json={"messages": messages} | body, headers=headers)

    def message(self, messages: list[dict], sid: str = "s", **body: Any) -> httpx.Response:
        return self.client.post("/v1/messages", json={"messages": messages} | body, headers={"X-Api-Key": sid})

    def finish(self, sid: str = "s", **values: Any) -> list[Sample]:
        return asyncio.run(self.adapter.finish_session(sid, base_sample=Sample(index=0), **values))

    def close(self) -> None:
        self.client.close()
        self.handle.stop()
        self.engine.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def build(kind: type, replies: list[Any], **settings: Any) -> Agent:
        made.append(Agent(kind, replies, **settings))
        return made[-1]

    yield build
    for agent in made:
        agent.close()


Q = {"role": "user", "content": "q"}


def test_a_tool_using_conversation_becomes_one_sample_of_the_very_tokens_that_were_sampled(make):
    agent = make(OpenAIAdapter, ["<think>hm</think>" + CALL + END, "4" + END])
    agent.adapter.open_session("s", sampling_defaults={"temperature": 0.7, "max_new_tokens": 60})
    first = agent.chat([Q], tools=[TOOL]).json()
    message = first["choices"][0]["message"]
    assert (first["choices"][0]["finish_reason"], message["content"]) == ("tool_calls", None)
    assert message["reasoning_content"] == "hm"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"a": "1", "b": "2"}'}
    assert (len(call["id"]), first["object"], first["model"]) == (29, "chat.completion", "slime-actor")
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "seen"}]}
    second = agent.chat([Q, message, result], tools=[TOOL]).json()
    assert second["choices"][0]["message"]["content"] == "4"
    assert second["choices"][0]["finish_reason"] == "stop"
    sent = agent.engine.requests
    assert second["usage"] == {
        "prompt_tokens": len(sent[1]["input_ids"]),
        "completion_tokens": 2,
        "total_tokens": len(sent[1]["input_ids"]) + 2,
    }
    assert sent[0]["return_logprob"]
    assert sent[0]["sampling_params"]["temperature"] == 0.7
    assert sent[0]["sampling_params"]["max_new_tokens"] == 60
    (sample,) = agent.finish(reward=1.0)
    assert sample.tokens == sent[1]["input_ids"] + [ord("4"), ord(END)]
    assert sample.response.endswith(f"t:seen{END}a:4{END}")
    assert sample.metadata["use_tool"]
    # the template shows a call in other words than it was sampled in, so the first response is context
    assert sum(sample.loss_mask) == 2
    assert sample.weight_versions == ["3"]
    assert agent.finish() == []


def test_plain_turns_keep_the_training_of_every_response(make):
    agent = make(OpenAIAdapter, ["one" + END, "two" + END])
    agent.adapter.open_session("s")
    agent.chat([Q])
    agent.chat([Q, {"role": "assistant", "content": "one"}, {"role": "user", "content": "r"}])
    (sample,) = agent.finish()
    assert sample.response == "one$u:r$a:two$"
    assert sample.loss_mask == [1] * 4 + [0] * 6 + [1] * 4
    assert sample.rollout_log_probs[:4] == [-0.1, -0.2, -0.3, -0.4]


def test_a_client_cannot_change_how_samples_are_drawn_unless_it_may(make, caplog):
    body = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "max_tokens": 9, "stop": ["x"]}
    agent = make(OpenAIAdapter, ["a", "b"])
    agent.adapter.open_session("s", sampling_defaults={"temperature": 1.0, "max_new_tokens": 50})
    agent.chat([Q], **body)
    params = agent.engine.requests[0]["sampling_params"]
    assert params["temperature"] == 1.0
    assert "top_p" not in params
    assert (params["max_new_tokens"], params["stop"], params["no_stop_trim"]) == (9, ["x"], True)
    assert "temperature, which is ignored" in caplog.text
    free = make(OpenAIAdapter, [completion_of("a", [[1]])], client_sampling=True)
    free.adapter.open_session("s", sampling_defaults={"top_p": 0.9, "top_k": 4000})
    assert free.chat([Q], **body).status_code == 200
    params = free.engine.requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.1, 0.5, 3)


def completion_of(text: str, masks: list[list[int]] | None = None) -> Callable[[Any], Any]:
    """The engine's answer, with the ids that each token was sampled from."""

    def reply(payload: dict[str, Any]) -> tuple[int, Any]:
        answer = completion(payload, [ord(c) for c in text], text=text)
        if masks is not None:
            answer["meta_info"] |= {
                "output_token_sampling_mask": masks,
                "output_token_sampling_logprobs": [-0.5] * len(masks),
            }
        return 200, answer

    return reply


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 3}])
@pytest.mark.parametrize("args", [None, Namespace(rollout_top_p=1.0, rollout_top_k=-1)])
def test_a_client_that_may_sample_as_it_likes_may_not_cut_a_vocabulary_that_the_trainer_takes_for_whole(
    make, cut, args
):
    agent = make(OpenAIAdapter, ["a", "b"], client_sampling=True, args=args)
    refused = agent.chat([Q], **cut)
    assert refused.status_code == 400
    assert "start the run with --rollout-top-p" in refused.json()["error"]["message"]
    assert agent.chat([Q], top_p=1.0, top_k=-1, temperature=0.5).status_code == 200
    assert "return_sampling_mask" not in agent.engine.requests[0]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_run_that_cuts_the_vocabulary_gets_the_sets_of_every_turn_from_an_engine(make, is_known):
    cut = {"rollout_top_p": 0.9, "rollout_top_k": -1}
    masks = [[97, 7], [36]]
    agent = make(
        OpenAIAdapter,
        [completion_of("a" + END, masks), completion_of("b" + END, masks)],
        args=Namespace(**cut) if is_known else None,
    )
    agent.adapter.open_session("s", sampling_defaults={} if is_known else {"top_p": 0.9, "top_k": 4000})
    agent.chat([Q])
    agent.chat([Q, {"role": "assistant", "content": "a"}, Q])
    for request in agent.engine.requests:
        assert request["return_sampling_mask"] is True
        assert request["sampling_params"]["top_k"] == 4000
    (sample,) = agent.finish()
    assert sample.rollout_top_p_token_ids.tolist() == [97, 7, 36] * 2
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, *[3] * 6, 5, 6]
    assert [value for value, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if mask] == [-0.5] * 4


def test_a_turn_names_the_adapter_that_engines_serve(make):
    args = Namespace(use_rollout_routing_replay=False, rollout_top_p=1.0, rollout_top_k=-1, lora_rank=8)
    agent = make(OpenAIAdapter, ["a"], args=args)
    assert agent.chat([Q]).status_code == 200
    assert agent.engine.requests[0]["lora_path"] == "policy"


def test_a_run_that_replays_experts_asks_for_them(make):
    args = Namespace(
        use_rollout_routing_replay=True, rollout_top_p=1.0, rollout_top_k=-1, num_layers=1, moe_router_topk=1
    )
    agent = make(OpenAIAdapter, ["a"], args=args)
    assert agent.chat([Q]).status_code == 200
    assert agent.engine.requests[0]["return_routed_experts"] is True


def test_an_engine_that_does_not_tell_the_sets_is_an_answer_502_at_the_first_turn(make):
    agent = make(OpenAIAdapter, [completion_of("a")], args=Namespace(rollout_top_p=0.9, rollout_top_k=-1))
    reply = agent.chat([Q])
    assert reply.status_code == 502
    assert "did not say which ids it sampled from" in reply.json()["error"]["message"]


@pytest.mark.parametrize("cap", ["9", "NaN", "Infinity", 0, True, [1]])
def test_a_cap_that_is_no_positive_number_is_an_answer_400(make, cap):
    agent = make(OpenAIAdapter, [])
    content = json.dumps({"messages": [Q], "max_tokens": cap})
    if cap in ("NaN", "Infinity"):  # as Python's JSON writes and reads them
        content = content.replace(f'"{cap}"', cap)
    reply = agent.client.post("/v1/chat/completions", content=content)
    assert reply.status_code == 400
    assert "max_tokens must be a positive number" in reply.json()["error"]["message"]


def test_the_context_limit_shortens_requests_and_a_full_one_sends_none(make):
    agent = make(OpenAIAdapter, ["abc"])
    agent.adapter.open_session("s", max_context_tokens=8)
    prompt = "u:q$a:"
    agent.chat([Q])
    assert agent.engine.requests[0]["sampling_params"]["max_new_tokens"] == 8 - len(prompt)
    full = agent.chat([{"role": "user", "content": "long enough"}]).json()
    assert full["choices"][0]["finish_reason"] == "length"
    assert len(agent.engine.requests) == 1
    (sample,) = agent.finish()
    assert (len(sample.tokens), sample.status) == (8, Sample.Status.TRUNCATED)


def test_the_stop_token_of_the_last_turn_is_no_text_of_the_response(make):
    agent = make(OpenAIAdapter, ["one" + END, "two" + END])
    agent.adapter.tokenizer.eos_token_id = ord(END)
    answer = agent.chat([Q]).json()["choices"][0]["message"]
    agent.chat([Q, answer, {"role": "user", "content": "r"}])
    (sample,) = agent.finish()
    assert sample.response == f"one{END}u:r{END}a:two"
    assert sample.tokens[-1] == ord(END)


def test_an_engine_that_aborts_is_an_answer_503_and_no_turn(make):
    agent = make(OpenAIAdapter, [("hal", "abort"), "half" + END])
    first = agent.chat([Q])
    assert (first.status_code, first.json()["error"]["type"]) == (503, "overloaded_error")
    assert agent.chat([Q]).status_code == 200
    (sample,) = agent.finish()
    assert sample.response == "half" + END


def test_an_engine_that_fails_is_tried_again_and_one_that_refuses_is_not(make):
    def is_copy(payload):
        return 400, f"Duplicate request ID detected: {payload['rid']}"

    agent = make(OpenAIAdapter, [lambda payload: (500, "busy"), is_copy, "a", lambda payload: (400, "too long")])
    assert agent.chat([Q]).status_code == 200
    rids = {request["rid"] for request in agent.engine.requests}
    assert len(rids) == 3, "an attempt that got lost may still be running under its id"
    refused = agent.chat([Q])
    assert (refused.status_code, len(agent.engine.requests)) == (502, 4)
    assert "too long" in refused.json()["error"]["message"]


@pytest.mark.parametrize("body", ["[1]", "{", '{"messages": 1}', '{"messages": ["hi"]}'])
def test_a_body_that_is_no_request_is_an_answer_400(make, body):
    agent = make(OpenAIAdapter, [])
    reply = agent.client.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_sessions_close_count_turns_and_can_be_required(make):
    agent = make(OpenAIAdapter, ["a", "b"], max_turns_per_sid=1, needs_session=True)
    assert agent.chat([Q], sid="unknown").status_code == 401
    agent.adapter.open_session("s")
    with pytest.raises(ValueError, match="open already"):
        agent.adapter.open_session("s")
    assert agent.chat([Q]).status_code == 200
    limited = agent.chat([Q])
    assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
    asyncio.run(agent.adapter.drop_session("s"))
    closed = agent.chat([Q])
    assert (closed.status_code, closed.json()["error"]["message"]) == (503, "session closed")
    assert agent.finish() == []


def test_each_turn_of_an_agent_is_a_span_of_its_sample_that_the_engine_continues(make, monkeypatch):
    facts = {"use_rollout_routing_replay": False, "rollout_top_p": 1.0, "rollout_top_k": -1, "lora_rank": 0}
    args = Namespace(**facts, trace_endpoint="http://x", trace_share=1.0, rollout_max_context_len=None)
    agent = make(OpenAIAdapter, ["4" + END] * 3, args=args)
    monkeypatch.setattr(service, "GenerateState", lambda args: SimpleNamespace(is_ending=False))
    runs = object.__new__(service.AgentService)
    runs.adapter, runs.slots = agent.adapter, Slots(1)
    sample = Sample(index=0)

    async def work(sid: str) -> service.Outcome:
        for _ in range(2):
            assert (await asyncio.to_thread(agent.chat, [Q], sid)).status_code == 200
        return 1.0, {}

    async def play() -> None:
        with trace_span(sample, "generate_and_rm"):
            await runs.run(args, sample, {}, work)

    asyncio.run(play())
    root, *turns = otlp_spans(bind_trace(sample).carrier)
    assert [span["name"] for span in turns] == ["sglang_generate"] * 2
    assert {span["parentSpanId"] for span in turns} == {root["spanId"]}
    headers = [header["traceparent"] for header in agent.engine.headers]
    assert headers == [f"00-{span['traceId']}-{span['spanId']}-01" for span in turns]
    args.trace_endpoint = None
    agent.adapter.open_session("s", trace=bind_trace(Sample()))
    agent.engine.headers.clear()
    agent.chat([Q])
    assert not any("traceparent" in header for header in agent.engine.headers)


def test_other_machines_cannot_open_sessions_by_using_them(make, monkeypatch):
    agent = make(OpenAIAdapter, ["a", "b", "c"])
    assert agent.handle.host == "127.0.0.1"
    assert agent.chat([Q], sid="").status_code == 200
    monkeypatch.setattr(common, "is_from_here", lambda request: False)
    assert agent.chat([Q], sid="guess").status_code == 401
    agent.adapter.open_session("s")
    assert agent.chat([Q]).status_code == 200
    agent.adapter.needs_session = False
    assert agent.chat([Q], sid="guess").status_code == 200


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        *(("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("", True)),
        *(("10.1.2.3", False), ("fe80::1%eth0", False), ("::ffff:10.1.2.3", False)),
    ],
)
def test_a_client_is_of_this_machine_where_it_comes_over_loopback(peer, is_here):
    transport = SimpleNamespace(get_extra_info=lambda name, default=None: (peer, 5) if name == "peername" else default)
    assert wire.is_from_here(make_mocked_request("GET", "/", transport=transport)) is is_here


def test_the_session_is_named_by_token_or_body(make):
    agent = make(OpenAIAdapter, ["a", "b", "c"])
    agent.chat([Q], sid="x")
    agent.chat([Q], sid="", metadata={"session_id": "y"})
    agent.chat([Q], sid="")
    for sid in ("x", "y", "default"):
        asyncio.run(agent.adapter.shutdown_session(sid))  # waits for the work after the answer
    assert [agent.adapter.manager.turn_count(sid) for sid in ("x", "y", "default")] == [1, 1, 1]


def test_sessions_that_their_clients_left_are_forgotten(make, monkeypatch):
    agent = make(OpenAIAdapter, ["a", "b"])
    agent.chat([Q], sid="left")
    asyncio.run(agent.adapter.shutdown_session("left"))
    monkeypatch.setattr(common, "MAX_IDLE_S", -1.0)
    agent.chat([Q], sid="next")
    assert not agent.adapter.manager.has_session("left")
    assert list(agent.adapter.store) == ["next"]


def test_a_finish_waits_for_the_turn_under_way(make):
    release = threading.Event()

    def slow(payload):
        release.wait(120)
        return 200, completion(payload, [ord("a")])

    agent = make(OpenAIAdapter, [slow])
    agent.adapter.open_session("s")
    client = threading.Thread(target=agent.chat, args=([Q],))
    client.start()

    async def finish():
        async with asyncio.timeout(10):
            while not agent.engine.requests:
                await asyncio.sleep(0.01)
        task = asyncio.create_task(agent.adapter.finish_session("s", base_sample=Sample()))
        await asyncio.sleep(0)
        release.set()
        return await task

    (sample,) = asyncio.run(finish())
    client.join()
    assert sample.response == "a"


def test_a_client_that_leaves_takes_its_request_along(make):
    hold = threading.Event()

    def endless(payload):
        hold.wait(120)
        return 200, completion(payload, [ord("a")])

    agent = make(OpenAIAdapter, [endless])
    with pytest.raises(httpx.ReadTimeout):
        agent.client.post("/v1/chat/completions", json={"messages": [Q]}, timeout=2.0)
    assert agent.engine.aborted.wait(120), "the engine was told"
    hold.set()
    assert agent.adapter.manager.turn_count("default") == 0


def events(reply: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_stream_of_openai_chunks_adds_up_to_the_message(make):
    agent = make(OpenAIAdapter, ["<think>hm</think>so" + END, CALL])
    reply = agent.chat([Q], stream=True)
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.text.endswith("data: [DONE]\n\n")
    deltas = [event["choices"][0]["delta"] for event in events(reply)]
    assert deltas == [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "so"}, {}]
    assert events(reply)[-1]["usage"]["completion_tokens"] == len("<think>hm</think>so$")
    (call,) = events(agent.chat([Q], stream=True, tools=[TOOL]))[1]["choices"][0]["delta"]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "look")


def test_anthropic_blocks_whole_and_as_a_stream(make):
    agent = make(AnthropicAdapter, ["<think>hm</think>see" + CALL + END] * 2 + [("cut", "length")])
    tools = [{"name": "look", "description": "d", "input_schema": {"type": "object"}}]
    whole = agent.message([Q], system="sys", tools=tools).json()
    kinds = [block["type"] for block in whole["content"]]
    assert (kinds, whole["stop_reason"]) == (["thinking", "text", "tool_use"], "tool_use")
    assert whole["content"][2]["input"] == {"a": "1", "b": "2"}
    stream = events(agent.message([Q], system="sys", tools=tools, stream=True))
    assert stream[0]["type"] == "message_start"
    assert [event["delta"]["type"] for event in stream if event["type"] == "content_block_delta"] == [
        "thinking_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert stream[-2]["delta"]["stop_reason"] == "tool_use"
    assert stream[-1]["type"] == "message_stop"
    assert agent.message([Q]).json()["stop_reason"] == "max_tokens"
    counted = agent.client.post("/v1/messages/count_tokens", json={"messages": [Q]})
    assert counted.json() == {"input_tokens": 0}


def test_the_turns_of_a_session_share_one_copy_of_their_tools(make):
    turns: list[Any] = []
    agent = make(OpenAIAdapter, ["a" + END] * 3, debug_callback=lambda *values: turns.append(values[-1]))
    chat, said = [Q], {"role": "assistant", "content": "a"}
    for tools in ([TOOL], [TOOL], []):
        agent.chat(chat, tools=tools)
        chat = [*chat, said, Q]
    agent.finish()  # waits for the work after the answer
    assert turns[0].tools is turns[1].tools
    assert [turn.tools is None for turn in turns] == [False, False, True]


def test_the_debug_callback_sees_the_turn_and_health_is_answered(make):
    seen: list[tuple] = []
    agent = make(OpenAIAdapter, ["a" + END], debug_callback=lambda *values: seen.append(values))
    agent.chat([Q])
    agent.finish()  # waits for the work after the answer
    ((sid, messages, tools, message, turn),) = seen
    assert (sid, messages, tools, message) == ("s", [Q], None, {"role": "assistant", "content": "a"})
    assert turn.output_ids == [ord("a"), ord(END)]
    assert agent.client.get("/healthz").json() == agent.client.get("/v1/models").json() == {"ok": True}


def test_openai_messages_are_translated_for_the_chat_template():
    calls = [{"id": "1", "function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "[1]", "{")]
    translated = from_openai(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "t"},
            {"role": "critic", "content": "?"},
        ]
    )
    assert translated[0] == {"role": "system", "content": "be kind"}
    assert translated[1]["content"] == "a\n[image omitted]"
    assert translated[2]["reasoning_content"] == "r"
    assert [call["function"]["arguments"] for call in translated[2]["tool_calls"]] == [
        {"a": 1},
        {"_raw_arguments": "[1]"},
        {"_raw_arguments": "{"},
    ]
    assert translated[3] == {"role": "tool", "content": "t"}
    assert len(translated) == 4


def test_openai_tools_may_be_flat_and_other_kinds_are_left_out():
    flat = {"type": "function", "name": "f"}
    (tool,) = _tools_to_chat_tools([flat, {"type": "web_search"}])
    assert tool["function"] == {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert _tools_to_chat_tools([]) is None


def test_anthropic_messages_are_translated_for_the_chat_template():
    thought = {"type": "thinking", "thinking": "hm"}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "t"}]}
    translated = from_anthropic(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ],
        [{"type": "text", "text": "sys"}],
    )
    assert [message["role"] for message in translated] == ["system", "user", "assistant", "tool", "user"]
    assert translated[2]["reasoning_content"] == "hm"
    assert translated[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert [message["content"] for message in translated[3:]] == ["t", "go on"]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("us", [("user", ["user", "s1"])]),  # the user before it, whose text becomes a block
        ("asu", [("assistant", None), ("user", ["s1", "user"])]),  # else the next one
        ("as", [("assistant", None), ("user", ["s1"])]),  # else one is made
        ("su", [("system", None), ("user", None)]),  # the first stays
    ],
)
def test_a_system_message_in_the_middle_goes_into_a_users_message(roles, expected):
    names = {"u": "user", "s": "system", "a": "assistant"}
    original = [
        {"role": names[role], "content": f"s{i}" if role == "s" else names[role]} for i, role in enumerate(roles)
    ]
    body = {"messages": original}
    assert _fold_mid_list_system_into_user(body) is (roles != "su")
    wrapped = "<system-reminder>\n{}\n</system-reminder>\n"
    for message, (role, blocks) in zip(body["messages"], expected, strict=True):
        assert message["role"] == role
        if blocks is not None:
            texts = [wrapped.format(text) if text.startswith("s") else text for text in blocks]
            assert [block["text"] for block in message["content"]] == texts
    assert not _fold_mid_list_system_into_user(body), "once is enough"


def test_content_of_every_shape_is_flattened():
    assert flatten_content(None) == ""
    assert flatten_content(7) == "7"
    nested = {"type": "tool_result", "content": [{"type": "output_text", "text": "a"}, {"type": "image"}]}
    assert flatten_content([nested, {"type": "text", "text": ""}, {"content": "b"}]) == "a\n[image omitted]\nb"


def test_a_conversation_that_takes_long_to_tokenize_keeps_no_other_session_waiting(make):
    agent = make(OpenAIAdapter, ["a"])
    has_begun, may_end = threading.Event(), threading.Event()
    render = agent.adapter.tokenizer.apply_chat_template

    def slow(*args, **values):
        has_begun.set()
        assert may_end.wait(120)
        return render(*args, **values)

    agent.adapter.tokenizer.apply_chat_template = slow
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(agent.chat, [Q])
        assert has_begun.wait(120)
        assert agent.client.get("/healthz", timeout=600).json() == {"ok": True}
        may_end.set()
        assert turn.result().status_code == 200


def test_a_server_that_cannot_start_says_why(make):
    agent = make(OpenAIAdapter, [])
    with pytest.raises(OSError, match="in use"):
        run_app_in_thread(OpenAIAdapter(tokenizer=None, sglang_url="").app, host="127.0.0.1", port=agent.handle.port)
    slow, release = OpenAIAdapter(tokenizer=None, sglang_url="").app, threading.Event()

    async def block(app):
        release.wait(120)

    slow.on_startup.append(block)
    with pytest.raises(DeadlineExceeded, match="did not listen"):
        run_app_in_thread(slow, host="127.0.0.1", start_timeout_sec=0.05)
    release.set()
    agent.handle.stop()
    assert not agent.handle.thread.is_alive()
    agent.handle.stop()


HALF = '<tool_call>\n{"name": "look", "arguments": {"a": "x\\ud83d"}}\n</tool_call>' + END


def test_half_a_character_in_a_call_reaches_the_client_also_in_a_stream(make):
    agent = make(OpenAIAdapter, [HALF], tool_parser="qwen25")
    agent.adapter.open_session("s")
    lines = [line for line in agent.chat([Q], tools=[TOOL], stream=True).text.splitlines() if '"arguments"' in line]
    (call,) = json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a": "x?"}'
    assert len(agent.finish()) == 1
    agent = make(AnthropicAdapter, [HALF], tool_parser="qwen25")
    tool = {"name": "look", "input_schema": {"type": "object"}}
    assert '{\\"a\\": \\"x?\\"}' in agent.message([Q], tools=[tool], stream=True).text


def test_arguments_of_a_call_become_an_object_that_can_be_encoded():
    assert as_object('{"a": "\\ud83d\\ude00", "b": NaN}')[0]["a"] == "\U0001f600"
    assert as_object("[1]") == ({"_raw_arguments": "[1]"}, False)
    assert as_object("[" * 100_000) == ({"_raw_arguments": "[" * 100_000}, False)
    assert as_object(None) == ({}, True)
    assert as_object({"a": 1}) == ({"a": 1}, True)
