"""Anthropic messages, ``POST /v1/messages``, whole or as a stream of one turn that is already complete.

The session id is the API key that the client was given, as bearer token or ``X-Api-Key``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from aiohttp import web

from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.wire import (
    Reply,
    dumps,
    event,
    flatten_content,
    messages_of,
    model_of,
    new_id,
    said,
    sid_from_bearer,
    tool_call_dict,
    tool_dict,
)
from slime.agent.parsing import ParsedModelOutput
from slime.agent.trajectory import Message

if TYPE_CHECKING:
    from anthropic.types import TextBlockParam, ThinkingBlockParam, ToolUseBlockParam

    Block = TextBlockParam | ThinkingBlockParam | ToolUseBlockParam

_MID_SYSTEM_WRAP_PREFIX = "<system-reminder>\n"
_MID_SYSTEM_WRAP_SUFFIX = "\n</system-reminder>\n"


class AnthropicAdapter(BaseAdapter):
    """See the module. Arguments are those of :class:`BaseAdapter`."""

    logger: ClassVar[logging.Logger] = logging.getLogger(__name__)
    log_prefix: ClassVar[str] = "anthropic adapter"
    max_token_keys: ClassVar[tuple[str, ...]] = ("max_tokens",)
    stop_keys: ClassVar[tuple[str, ...]] = ("stop_sequences",)
    finish_reasons: ClassVar[Mapping[str, str]] = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}

    def _register_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/messages", self._run_turn)
        app.router.add_post("/v1/messages/count_tokens", _count_tokens)

    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        return _request_session_id(request)

    def _preprocess_body(self, body: dict[str, Any]) -> None:
        _fold_mid_list_system_into_user(body)

    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        return _translate_messages(messages_of(body), body.get("system")), _tools_to_chat_tools(body.get("tools"))

    def _reply_parts(self, parsed: ParsedModelOutput) -> tuple[list[Block], Message]:
        blocks: list[Block] = []
        if parsed.reasoning:
            # The protocol requires a signature, and the client sends it back. Its value is not read.
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.text:
            blocks.append({"type": "text", "text": parsed.text})
        for use in parsed.tool_uses:
            blocks.append({"type": "tool_use", "id": new_id("toolu", 16), "name": use["name"], "input": use["input"]})
        # An answer without any block is invalid.
        return blocks or [{"type": "text", "text": ""}], said(parsed)

    def _whole(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> dict[str, Any]:
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model_of(body),
            "content": reply.wire,
            "stop_reason": reply.finish_reason,
            "stop_sequence": None,
            "usage": {"input_tokens": in_tok, "output_tokens": out_tok},
        }

    def _events(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> Iterator[str]:
        done = self._whole(body, reply, in_tok, out_tok)
        usage = done["usage"]
        begun = done | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
        yield event("message_start", message=begun)
        for index, block in enumerate(reply.wire):
            empty, delta = _block_events(block)
            yield event("content_block_start", index=index, content_block=empty)
            yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        yield event("message_delta", delta={"stop_reason": reply.finish_reason, "stop_sequence": None}, usage=usage)
        yield event("message_stop")


def _request_session_id(request: web.Request) -> str:
    return sid_from_bearer(request) or request.headers.get("X-Api-Key", "").strip() or "default"


def _fold_mid_list_system_into_user(body_obj: dict[str, Any]) -> bool:
    """Move system messages that are not the first into users' messages: most templates allow one at the top only.

    Returns:
        Whether anything was moved.
    """
    messages = body_obj.get("messages")
    if not isinstance(messages, list):
        return False
    kept: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # blocks for the next user message
    has_moved = False
    for index, message in enumerate(messages):
        if index > 0 and message.get("role") == "system":
            has_moved = True
            text = _MID_SYSTEM_WRAP_PREFIX + flatten_content(message.get("content")) + _MID_SYSTEM_WRAP_SUFFIX
            block = {"type": "text", "text": text}
            earlier = next((known for known in reversed(kept) if known.get("role") == "user"), None)
            if earlier is not None:
                earlier["content"] = [*_blocks(earlier.get("content")), block]
            elif any(later.get("role") == "user" for later in messages[index:]):
                waiting.append(block)
            else:
                kept.append({"role": "user", "content": [block]})
            continue
        if waiting and message.get("role") == "user":
            message = message | {"content": [*waiting, *_blocks(message.get("content"))]}
            waiting = []
        kept.append(dict(message))
    if has_moved:
        body_obj["messages"] = kept
    return has_moved


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _translate_messages(msgs: list[dict[str, Any]], system: Any) -> list[Message]:
    """Messages for the chat template: every block of a user is a separate message, tool results have role tool."""
    translated: list[Message] = []
    if system:
        translated.append({"role": "system", "content": flatten_content(system)})
    for message in msgs:
        match message.get("role"):
            case "assistant":
                translated.append(_translate_assistant(message.get("content")))
            case "user":
                translated += _translate_user(message.get("content"))
            case "system":
                translated.append({"role": "system", "content": flatten_content(message.get("content"))})
            case _:
                continue  # roles that no template knows
    return translated


def _translate_user(content: Any) -> Iterator[Message]:
    if not isinstance(content, list):
        yield {"role": "user", "content": flatten_content(content)}
        return
    for block in content:
        is_result = isinstance(block, dict) and block.get("type") == "tool_result"
        yield {"role": "tool" if is_result else "user", "content": flatten_content([block])}


def _translate_assistant(content: Any) -> Message:
    blocks = [block for block in _blocks(content) if isinstance(block, dict)]
    texts = (str(block.get("text") or "") for block in blocks if block.get("type") == "text")
    thoughts = "".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking")
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = thoughts
    if uses:
        message["tool_calls"] = [tool_call_dict(str(use.get("name") or ""), use.get("input") or {}) for use in uses]
    return message


def _tools_to_chat_tools(anth_tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    named = (tool for tool in anth_tools or () if tool.get("name"))
    return [tool_dict(tool, tool.get("input_schema") or tool.get("parameters")) for tool in named] or None


def _block_events(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the block as it starts, its only delta)."""
    match block["type"]:
        case "thinking":
            return block | {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case "text":
            return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        case "tool_use":
            return block | {"input": {}}, {"type": "input_json_delta", "partial_json": dumps(block["input"])}
        case kind:
            raise AssertionError(f"a block of type {kind}")


async def _count_tokens(request: web.Request) -> web.Response:
    # Clients need an answer from this route. The adapter itself limits the context.
    return web.json_response({"input_tokens": 0})
