"""A tokenizer with a token per byte, and the shape of Qwen's chat templates: tools, automatic system text, thoughts."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["QWEN2_5", "QWEN3", "make_tokenizer"]

_TOOLS = """{{- '# Tools' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}"""
_CALLS = """{%- for call in message.tool_calls or [] %}
    {{- '\n<tool_call>' + call.function.name + '(' }}{{- call.function.arguments | tojson }}{{- ')</tool_call>' }}
{%- endfor %}"""
_RESULTS = """{%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>' + message.content + '</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}"""
_PROMPT = """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_PLAIN = """{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}"""

QWEN2_5 = (
    """{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' %}
{{- '<|im_start|>system\n' + system }}{%- if tools %}{{- '\n\n' }}"""
    + _TOOLS
    + """{%- else %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}"""
    + _PLAIN
    + """{{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"""
    + _CALLS
    + """{{- '<|im_end|>\n' }}"""
    + _RESULTS
    + "{%- endfor %}"
    + _PROMPT
)
"""Adds a system text if there is none. Except for runs of tools, the position of a message does not change its text."""

QWEN3 = (
    """{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"""
    + _TOOLS
    + """{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set place = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set place.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}"""
    + _PLAIN
    + """{{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > place.last_user %}
        {{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
    {%- endif %}{{- message.content }}"""
    + _CALLS
    + """{{- '<|im_end|>\n' }}"""
    + _RESULTS
    + "{%- endfor %}"
    + _PROMPT
)
"""No system text by default. Thoughts of turns before the last user message are left out."""


def make_tokenizer(template: str) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer
