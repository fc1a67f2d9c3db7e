"""Split the text of a model into reasoning, answer and tool calls.

Called by the adapters, once per turn. A named parser is SGLang's, imported on first use. Without a name ``</think>``
ends the reasoning, and tool calls have the XML form.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import kept

logger = logging.getLogger(__name__)

ToolUse = dict[str, Any]
"""``{"name": str, "input": dict}``"""

END_OF_THOUGHT = "</think>"
_CALL = re.compile(r"<tool_call>\s*<function=([^>\s]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ParsedModelOutput:
    """One turn's output. ``ill_formed``: the arguments of a tool call were not a JSON object."""

    reasoning: str
    text: str
    tool_uses: list[ToolUse]
    ill_formed: bool = False


def parse_model_output(
    raw_output: str,
    *,
    tools_schema: list[dict[str, Any]] | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
) -> ParsedModelOutput:
    """Split a decoded output.

    Args:
        tools_schema: the tools offered, ``{"type": "function", "function": {"name", ...}}`` each.
        tool_parser_name: value of ``--sglang-tool-call-parser``.
        reasoning_parser_name: value of ``--sglang-reasoning-parser``.
    """
    reasoning, body = "", raw_output
    if reasoning_parser_name:
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        parser = ReasoningParser(model_type=reasoning_parser_name, stream_reasoning=False)
        found, rest = parser.parse_non_stream(raw_output)
        reasoning, body = found or "", rest or ""
    if not reasoning and END_OF_THOUGHT in body:
        # A template may put <think> into the prompt, so only the end mark is certain.
        reasoning, _, body = body.partition(END_OF_THOUGHT)
        reasoning = reasoning.strip().removeprefix("<think>")
    text, uses, ill_formed = parse_tool_uses(body, tools_schema, tool_parser_name)
    return ParsedModelOutput(reasoning.strip(), text.strip(), uses, ill_formed)


def parse_tool_uses(
    body: str, tools_schema: list[dict[str, Any]] | None, tool_parser_name: str | None
) -> tuple[str, list[ToolUse], bool]:
    """(text without the calls, calls, whether one was ill-formed)."""
    if not tools_schema:
        return body, [], False
    if tool_parser_name:
        text, uses, ill_formed = _parse_by_sglang(body, tools_schema, tool_parser_name)
        if uses:
            return text, uses, ill_formed
    # Also after a parser that found no call.
    text, uses = parse_xml_tool_uses(body, tools_schema)
    return text, uses, False


def _parse_by_sglang(body: str, tools_schema: list[dict[str, Any]], name: str) -> tuple[str, list[ToolUse], bool]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    errors: list[Exception] = []
    with kept(errors):  # a detector may raise anything on text that it does not expect
        tools = [Tool.model_validate(tool) for tool in tools_schema]
        text, calls = FunctionCallParser(tools, name).parse_non_stream(body)
    if errors:
        logger.warning("the tool-call parser %s failed on %.200r", name, body, exc_info=errors[0])
        return body, [], False
    uses, ill_formed = [], False
    for call in calls:
        arguments, is_object = as_object(call.parameters)
        uses.append({"name": call.name or "", "input": arguments})
        ill_formed |= not is_object
    return text, uses, ill_formed


def as_object(arguments: Any) -> tuple[dict[str, Any], bool]:
    """(arguments of a tool call as an object, whether they are one). Other values are kept under ``_raw_arguments``."""
    if isinstance(arguments, dict):
        return arguments, True
    try:
        value = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        value = None
    found = value if isinstance(value, dict) else {"_raw_arguments": arguments}
    # A model may write half of a character as an escape. Neither UTF-8 nor a tokenizer takes it.
    return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace")), found is value


def parse_xml_tool_uses(body_text: str, tools_schema: list[dict[str, Any]]) -> tuple[str, list[ToolUse]]:
    """Take ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`` out of a text.

    Values are text without the space around it. Calls of tools that were not offered stay in the text.
    """
    names = {tool.get("function", tool).get("name") for tool in tools_schema}
    uses: list[ToolUse] = []

    def take(match: re.Match[str]) -> str:
        if match[1] not in names:
            # The tool was not offered: the call stays in the text.
            return match[0]
        uses.append({"name": match[1], "input": {key: value.strip() for key, value in _PARAMETER.findall(match[2])}})
        return ""

    return _CALL.sub(take, body_text), uses
