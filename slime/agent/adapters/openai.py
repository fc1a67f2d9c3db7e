"""OpenAI chat completions, ``POST /v1/chat/completions``, whole or as a stream of one turn that is already complete.

The session id is the API key that the client was given. ``POST /v1/responses`` has items instead of messages:
``previous_response_id`` continues a response of the same session, and a turn's items are its reasoning, its text and
all of its tool calls.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web

from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.generation import Session
from slime.agent.adapters.wire import (
    Dialect,
    Reply,
    dumps,
    event,
    flatten_content,
    messages_of,
    model_of,
    new_id,
    said,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
    tool_dict,
)
from slime.agent.parsing import ParsedModelOutput, as_object
from slime.agent.trajectory import Message

if TYPE_CHECKING:
    from openai.types import responses as types

    Item = types.ResponseReasoningItemParam | types.ResponseOutputMessageParam | types.ResponseFunctionToolCallParam

_ROLES = {"user": "user", "system": "system", "developer": "system"}


class Responses(Dialect):
    """The protocol of one request of ``session``."""

    finish_reasons: ClassVar[Mapping[str, str]] = {
        "tool_calls": "completed",
        "stop": "completed",
        "length": "incomplete",
    }

    def __init__(self, session: Session) -> None:
        self._responses = session.responses
        self._id = new_id("resp")
        self._conversation: list[Message] = []

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        previous = body.get("previous_response_id")
        if previous and (not isinstance(previous, str) or previous not in self._responses):
            raise ValueError(f"previous_response_id {previous!r} is not a response of this session")
        # Without instructions: those of a request replace the earlier ones.
        self._conversation = list(self._responses[previous]) if previous else []
        self._conversation += _messages_of_items(body.get("input"))
        return [*_system(body), *self._conversation], _function_tools(body) or None

    def _reply_parts(self, parsed: ParsedModelOutput) -> tuple[list[Item], Message]:
        items: list[Item] = []
        if parsed.reasoning:
            items.append(
                {
                    "type": "reasoning",
                    "id": new_id("rs"),
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": parsed.reasoning}],
                    "status": "completed",
                }
            )
        if parsed.text or not parsed.tool_uses:
            items.append(
                {
                    "type": "message",
                    "id": new_id("msg"),
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": parsed.text, "annotations": []}],
                    "status": "completed",
                }
            )
        for use in parsed.tool_uses:
            items.append(
                {
                    "type": "function_call",
                    "id": new_id("fc"),
                    "call_id": new_id("call"),
                    "name": use["name"],
                    "arguments": dumps(use["input"]),
                    "status": "completed",
                }
            )
        message = said(parsed)
        self._responses[self._id] = [*self._conversation, message]
        return items, message

    def _whole(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> dict[str, Any]:
        is_cut = reply.finish_reason == "incomplete"
        kept = ("instructions", "metadata", "previous_response_id", "temperature", "top_p", "max_output_tokens")
        return {key: body.get(key) for key in kept} | {
            "id": self._id,
            "object": "response",
            "created_at": time.time(),
            "status": reply.finish_reason,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": model_of(body),
            "output": reply.wire,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "usage": {
                "input_tokens": in_tok,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens},
                "output_tokens": out_tok,
                # The protocol requires the field. Tokens of thoughts are not counted apart.
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": in_tok + out_tok,
            },
        }

    def _events(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> Iterator[str]:
        done = self._whole(body, reply, in_tok, out_tok)
        begun = done | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
            *(pair for index, item in enumerate(reply.wire) for pair in _item_events(index, item)),
            (f"response.{reply.finish_reason}", {"response": done}),
        ]
        for number, (kind, values) in zip(itertools.count(), events, strict=False):
            yield event(kind, sequence_number=number, **values)


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(type, values) of the events of a complete item."""
    where = {"output_index": index, "item_id": item["id"]}
    is_call = item["type"] == "function_call"
    empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
    yield "response.output_item.added", {"output_index": index, "item": item | empty | {"status": "in_progress"}}
    if is_call:
        kind = "response.function_call_arguments"
        yield f"{kind}.delta", where | {"delta": item["arguments"]}
        yield f"{kind}.done", where | {"arguments": item["arguments"], "name": item["name"]}
    else:
        part = item["content"][0]
        where |= {"content_index": 0}
        log_probs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield "response.content_part.added", where | {"part": part | {"text": ""}}
        yield f"response.{part['type']}.delta", where | {"delta": part["text"]} | log_probs
        yield f"response.{part['type']}.done", where | {"text": part["text"]} | log_probs
        yield "response.content_part.done", where | {"part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _messages_of_items(items: Any) -> list[Message]:
    """Messages for the chat template. Reasoning, text and calls that follow each other are one message.

    Raises:
        ValueError: not a text or a list of items, or an item of another kind.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("input must be a text or a list of items")
    messages: list[Message] = []
    for item in items:
        match item.get("type") or "message", item.get("role"):
            case "message", "assistant":
                _assistant(messages, "content", "tool_calls")["content"] = flatten_content(item.get("content"))
            case "message", role if role in _ROLES:
                messages.append({"role": _ROLES[role], "content": flatten_content(item.get("content"))})
            case "reasoning", _:
                thoughts = _texts(item.get("content")) or _texts(item.get("summary"))
                if thoughts:
                    _assistant(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = thoughts
            case "function_call", _:
                call = tool_call_dict(str(item.get("name") or ""), as_object(item.get("arguments"))[0])
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output", _:
                messages.append({"role": "tool", "content": flatten_content(item.get("output"))})
            case kind, role:
                raise ValueError(f"input has an item of type {kind!r} and role {role!r}, which is not supported")
    return messages


def chat_of_request(body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """(messages, tools) of a request without earlier responses.

    Raises:
        ValueError: as :func:`_messages_of_items`.
    """
    return [*_system(body), *_messages_of_items(body.get("input"))], _function_tools(body)


def _system(body: dict[str, Any]) -> list[Message]:
    instructions = body.get("instructions")
    return [{"role": "system", "content": flatten_content(instructions)}] if instructions else []


def _function_tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    offered = (tool for tool in body.get("tools") or () if tool.get("type") == "function")
    return [tool_dict(tool, tool.get("parameters")) for tool in offered]


def response_of_chat(messages: Iterable[Message], model: str) -> dict[str, Any]:
    """A response with the text, calls and results of ``messages``, the assistant's and tools' of chat completions."""
    items: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        text, calls = message.get("content") or "", message.get("tool_calls") or ()
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": text})
            continue
        if text or not calls:
            content = [{"type": "output_text", "text": text, "annotations": list[Any]()}]
            head = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
            items.append({**head, "content": content})
        items += ({"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls)
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": time.time(),
        "status": "completed",
        "model": model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _assistant(messages: list[Message], *before: str) -> Message:
    """The last message if it is the assistant's and has none of the parts ``before``, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(part) for part in before):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _texts(parts: Any) -> str:
    return "".join(str(part.get("text") or "") for part in parts or () if isinstance(part, dict))


class OpenAIAdapter(BaseAdapter):
    """See the module. Arguments are those of :class:`BaseAdapter`."""

    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)
    log_prefix: ClassVar[str] = "openai adapter"
    max_token_keys: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stop_keys: ClassVar[tuple[str, ...]] = ("stop",)

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self._run_turn)
        app.router.add_post("/v1/responses", self._run_turn)

    def _dialect(self, request: web.Request, session: Session) -> Dialect:
        return Responses(session) if request.path == "/v1/responses" else self

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return _request_session_id(request, body)

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        return _translate_messages(messages_of(body)), _tools_to_chat_tools(body.get("tools"))

    def _reply_parts(self, parsed: ParsedModelOutput) -> tuple[dict[str, Any], Message]:
        """(message for the wire, message as the client will send it back). One tool call a turn: the first."""
        wire: dict[str, Any] = {"role": "assistant", "content": None if parsed.tool_uses else parsed.text}
        # The text beside a call is not returned, so the recorded message must not have it either.
        message: Message = {"role": "assistant", "content": "" if parsed.tool_uses else parsed.text}
        if parsed.reasoning:
            wire["reasoning_content"] = parsed.reasoning
        if parsed.tool_uses:
            use = parsed.tool_uses[0]
            arguments = json.dumps(use["input"], sort_keys=True, ensure_ascii=False)
            function = {"name": use["name"], "arguments": arguments}
            wire["tool_calls"] = [{"id": new_id("call"), "type": "function", "function": function}]
            message["tool_calls"] = [tool_call_dict(use["name"], use["input"])]
        return wire, message

    def _whole(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> dict[str, Any]:
        choice = {"index": 0, "message": reply.wire, "finish_reason": reply.finish_reason, "logprobs": None}
        return _envelope(body, "chat.completion") | {"choices": [choice], "usage": _usage(in_tok, out_tok)}

    def _events(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> Iterator[str]:
        envelope = _envelope(body, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            return f"data: {dumps(envelope | {'choices': [choice]} | extra)}\n\n"

        yield chunk({"role": "assistant"})
        if reply.wire.get("reasoning_content"):
            yield chunk({"reasoning_content": reply.wire["reasoning_content"]})
        if reply.wire.get("content"):
            yield chunk({"content": reply.wire["content"]})
        if reply.wire.get("tool_calls"):
            yield chunk({"tool_calls": [{"index": i} | call for i, call in enumerate(reply.wire["tool_calls"])]})
        yield chunk({}, reply.finish_reason, usage=_usage(in_tok, out_tok))
        yield "data: [DONE]\n\n"


def _request_session_id(request: web.Request, body: dict[str, Any]) -> str:
    return sid_from_bearer(request) or sid_from_body(body) or "default"


def _translate_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Messages for the chat template. Ids of tool calls are dropped: templates do not show them."""
    translated: list[Message] = []
    for message in messages:
        match message.get("role"):
            case "developer" | "system":
                translated.append({"role": "system", "content": flatten_content(message.get("content"))})
            case "user" | "tool" as role:
                translated.append({"role": role, "content": flatten_content(message.get("content"))})
            case "assistant":
                translated.append(_translate_assistant(message))
            case _:
                continue  # roles that no template knows
    return translated


def _translate_assistant(message: dict[str, Any]) -> Message:
    translated: Message = {"role": "assistant", "content": flatten_content(message.get("content"))}
    if message.get("reasoning_content"):
        translated["reasoning_content"] = message["reasoning_content"]
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if functions:
        translated["tool_calls"] = [
            tool_call_dict(str(call.get("name") or ""), _arguments_as_dict(call.get("arguments"))) for call in functions
        ]
    return translated


def _arguments_as_dict(arguments: Any) -> dict[str, Any]:
    """Arguments as an object. Any other value is kept under ``_raw_arguments``."""
    return as_object(arguments)[0]


def _tools_to_chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Function tools, nested or flat, in the nested form. None without tools."""
    found = []
    for tool in tools or ():
        function = tool.get("function") or tool
        if tool.get("type", "function") == "function" and function.get("name"):
            found.append(tool_dict(function, function.get("parameters")))
    return found or None


def _usage(in_tok: int, out_tok: int) -> dict[str, int]:
    return {"prompt_tokens": in_tok, "completion_tokens": out_tok, "total_tokens": in_tok + out_tok}


def _envelope(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": new_id("chatcmpl"), "object": kind, "created": int(time.time()), "model": model_of(body)}
