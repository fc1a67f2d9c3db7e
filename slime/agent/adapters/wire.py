"""Shared by the wire protocols of all adapters: the hooks of a protocol, errors, session ids, pieces of messages."""

from __future__ import annotations

import ipaddress
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from aiohttp import web

from slime.agent.parsing import ParsedModelOutput
from slime.agent.trajectory import Message


@dataclass
class Reply:
    """A turn's reply: the message as the client will send it back, and its form on the wire.

    Attributes:
        cached_tokens: tokens of the prompt that the engine had in its cache.
    """

    manager_message: Message
    finish_reason: str
    wire: Any
    cached_tokens: int = 0


class Dialect(ABC):
    """The hooks of a protocol. ``_build_reply`` and ``_respond`` call the three after them."""

    finish_reasons: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def _translate(self, body: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """(messages for the chat template, tools or None). ValueError: the request is wrong (400)."""

    def _build_reply(
        self,
        parsed: ParsedModelOutput,
        raw_finish: str,
        translated: list[Message],
        tools_schema: list[dict[str, Any]] | None,
    ) -> Reply:
        """The reply as the conversation keeps it, and as the client receives it."""
        wire, message = self._reply_parts(parsed)
        finish = manager_finish_reason(parsed.tool_uses, raw_finish)
        return Reply(message, self.finish_reasons.get(finish, finish), wire)

    async def _respond(
        self, request: web.Request, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int, stream: bool
    ) -> web.StreamResponse:
        """Send the answer completely."""
        if stream:
            return await send_events(request, self._events(body, reply, in_tok, out_tok))
        return await send_json(request, self._whole(body, reply, in_tok, out_tok))

    def _reply_parts(self, parsed: ParsedModelOutput) -> tuple[Any, Message]:
        """(message for the wire, message as the client will send it back)."""
        raise NotImplementedError

    def _whole(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> dict[str, Any]:
        """The answer in one object."""
        raise NotImplementedError

    def _events(self, body: dict[str, Any], reply: Reply, in_tok: int, out_tok: int) -> Iterator[str]:
        """The answer as server-sent events, ready for the wire."""
        raise NotImplementedError


def new_id(prefix: str, length: int = 24) -> str:
    return f"{prefix}_{uuid4().hex[:length]}"


def model_of(body: dict[str, Any]) -> str:
    return str(body.get("model") or "slime-actor")


def event(kind: str, **values: Any) -> str:
    """A server-sent event of the protocols whose events have names."""
    return f"event: {kind}\ndata: {dumps({'type': kind} | values)}\n\n"


async def health(request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


def error_reply(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


async def send_json(request: web.Request, payload: Any) -> web.StreamResponse:
    """Send ``payload`` now, rather than when the handler returns."""
    response = web.json_response(payload)
    # ConnectionError if the client left: its turn is then not recorded.
    await response.prepare(request)
    await response.write_eof()
    return response


async def send_events(request: web.Request, events: Iterable[str]) -> web.StreamResponse:
    """Send server-sent events, each ready for the wire."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()
    return response


def is_from_here(request: web.Request) -> bool:
    """Whether the client is a program of this machine, over loopback or a socket file."""
    if not request.remote:
        return True  # a socket file: its clients have no address
    # Without the zone of an IPv6 address.
    address = ipaddress.ip_address(request.remote.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped.is_loopback  # ::ffff:127.0.0.1
    return address.is_loopback


def sid_from_bearer(request: web.Request) -> str:
    """The token of ``Authorization: Bearer``, else ""."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def sid_from_body(body: dict[str, Any]) -> str:
    """``metadata.session_id``, else ``user``, else ""."""
    metadata = body.get("metadata")
    named = metadata.get("session_id") if isinstance(metadata, dict) else None
    return str(named or body.get("user") or "")


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a request.

    Raises:
        ValueError: it is not a list of messages.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of objects")
    return messages


def dumps(value: Any) -> str:
    """JSON as the protocols' clients expect it."""
    return json.dumps(value, ensure_ascii=False)


_TEXT_TYPES = ("text", "input_text", "output_text")
_IMAGE_TYPES = ("image", "image_url", "input_image")


def flatten_content(c: Any) -> str:
    """A message's content as one text: blocks are joined by newlines, images become ``[image omitted]``."""
    match c:
        case None:
            return ""
        case str():
            return c
        case list():
            return "\n".join(filter(None, (_block_text(block) for block in c)))
        case _:
            return str(c)


def _block_text(block: Any) -> str:
    if not isinstance(block, dict):
        return flatten_content(block)
    kind = block.get("type")
    if kind in _TEXT_TYPES:
        return str(block.get("text") or "")
    if kind in _IMAGE_TYPES:
        return "[image omitted]"
    if kind == "tool_result":
        return flatten_content(block.get("content"))
    return flatten_content(block.get("content") or block.get("text"))


def tool_call_dict(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A tool call for chat templates: the arguments are an object, without an id."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(parsed: ParsedModelOutput) -> Message:
    """A whole turn as a message for chat templates."""
    message: Message = {"role": "assistant", "content": parsed.text}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_uses:
        message["tool_calls"] = [tool_call_dict(use["name"], use["input"]) for use in parsed.tool_uses]
    return message


def tool_dict(tool: dict[str, Any], parameters: Any) -> dict[str, Any]:
    """A tool for chat templates. ``parameters``: its JSON schema, if it has one."""
    schema = parameters or {"type": "object", "properties": {}}
    values = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": values}


def manager_finish_reason(tool_uses: Sequence[Any], raw_finish: str) -> str:
    """``tool_calls``, ``length`` or ``stop``."""
    if tool_uses:
        return "tool_calls"
    return "length" if raw_finish == "length" else "stop"
