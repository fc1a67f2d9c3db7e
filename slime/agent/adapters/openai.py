"""OpenAI chat completions, ``POST /v1/chat/completions``, whole or as a stream of one turn that is already complete.

The session id is the API key that the client was given. ``responses.py`` adds ``POST /v1/responses``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.common import BaseAdapter, Session
from slime.agent.adapters.responses import Responses
from slime.agent.adapters.wire import (
    Dialect,
    Reply,
    dumps,
    flatten_content,
    messages_of,
    model_of,
    new_id,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
    tool_dict,
)
from slime.agent.parsing import ParsedModelOutput, as_object
from slime.agent.trajectory import Message

__all__ = ["OpenAIAdapter"]


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
