"""Pieces of messages that all wire protocols translate the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """A tool call as chat templates read it: the arguments are an object, there is no id."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def manager_finish_reason(tool_uses: Sequence[Any], raw_finish: str) -> str:
    """``tool_calls``, ``length`` or ``stop``."""
    if tool_uses:
        return "tool_calls"
    return "length" if raw_finish == "length" else "stop"
