"""A model's text, split into reasoning, text and tool calls."""

from __future__ import annotations

import pytest

from slime.agent.parsing import ParsedModelOutput, parse_model_output, parse_tool_uses, parse_xml_tool_uses

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
PARAMETERS = "<parameter=where>\n a b \n</parameter><parameter=n>2</parameter>"
CALL = f"<tool_call>\n<function=look>\n{PARAMETERS}</function></tool_call>"


def parse(text: str, tools=TOOLS, tool_parser=None, reasoning_parser=None) -> ParsedModelOutput:
    return parse_model_output(
        text, tools_schema=tools, tool_parser_name=tool_parser, reasoning_parser_name=reasoning_parser
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>hm</think> so", "hm", "so"),
        ("hm\n</think>\nso", "hm", "so"),  # the template has opened it
        (" so ", "", "so"),
        ("<think>never closed", "", "<think>never closed"),
    ],
)
def test_reasoning_ends_with_its_tag_where_no_parser_is_named(text, reasoning, answer):
    assert parse(text) == ParsedModelOutput(reasoning, answer, [])


def test_xml_calls_are_taken_out_of_the_text():
    text, uses = parse_xml_tool_uses(f"first {CALL} then", TOOLS)
    assert text == "first  then"
    assert uses == [{"name": "look", "input": {"where": "a b", "n": "2"}}]


def test_calls_of_tools_that_were_not_offered_stay_in_the_text():
    unknown = CALL.replace("look", "rm")
    assert parse_xml_tool_uses(unknown, TOOLS) == (unknown, [])
    assert parse_tool_uses(CALL, None, None) == (CALL, [], False)


def test_sglangs_parser_reads_its_own_form_and_the_xml_form_is_still_understood():
    use = [{"name": "look", "input": {"where": "x"}}]
    own = '<tool_call>\n{"name": "look", "arguments": {"where": "x"}}\n</tool_call>'
    assert parse(f"I see {own}", tool_parser="qwen25") == ParsedModelOutput("", "I see", use)
    assert parse(CALL, tool_parser="llama3").tool_uses[0]["input"] == {"where": "a b", "n": "2"}


def test_sglangs_reasoning_parser_is_used_where_one_is_named():
    assert parse("<think>hm</think>so", reasoning_parser="qwen3") == ParsedModelOutput("hm", "so", [])


def test_arguments_that_are_no_object_are_kept_and_noted(monkeypatch):
    from types import SimpleNamespace

    from sglang.srt.function_call import function_call_parser

    class Parser:
        def __init__(self, tools, name):
            assert tools[0].function.name == "look"

        def parse_non_stream(self, text):
            return "", [SimpleNamespace(name="look", parameters="[1"), SimpleNamespace(name="look", parameters="")]

    monkeypatch.setattr(function_call_parser, "FunctionCallParser", Parser)
    parsed = parse("x", tool_parser="any")
    assert parsed.ill_formed
    assert [use["input"] for use in parsed.tool_uses] == [{"_raw_arguments": "[1"}, {}]


def test_a_parser_that_fails_is_no_failure_of_the_turn(caplog):
    assert parse(CALL, tool_parser="no-such-parser").tool_uses[0]["name"] == "look"
    assert "no-such-parser" in caplog.text
