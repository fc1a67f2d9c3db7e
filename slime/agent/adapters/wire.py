"""What travels between an adapter and its clients, whatever the protocol: replies, errors, session ids."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web


async def health(request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


def error_reply(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


async def send_json(request: web.Request, payload: Any) -> web.StreamResponse:
    """Send ``payload`` now, rather than when the handler returns."""
    response = web.json_response(payload)
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
    address = ipaddress.ip_address(request.remote.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def sid_from_bearer(request: web.Request) -> str:
    """The token of ``Authorization: Bearer``; "" without one."""
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
        ValueError: it is no list of messages.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of objects")
    return messages


def dumps(value: Any) -> str:
    """JSON as the protocols' clients expect it."""
    return json.dumps(value, ensure_ascii=False)
