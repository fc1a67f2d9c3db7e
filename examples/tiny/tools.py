"""Tool calls of tiny models: a chat template that renders them, the words, and conversations for the warm start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.tiny.recipe import make_model

__all__ = ["END", "NAMES", "call", "conversation", "make_tool_model"]

END = "<|im_end|>"
NAMES = ("amber", "basil", "cedar", "dahlia", "fennel", "hazel", "iris", "kelp", "laurel", "mint", "olive", "rose")
"""Names for data of the examples, one token each."""
_TAGS = ("<tool_call>", "<function=", "<parameter=", ">", "</parameter>", "</function>", "</tool_call>", "tool")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call><function=' + call['function']['name'] + '>' }}"
    "{% for key, value in call['function']['arguments'].items() %}"
    "{{ '<parameter=' + key + '>' + value + '</parameter>' }}{% endfor %}{{ '</function></tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tool_model(output: Path, words: Sequence[str] = ()) -> str:
    """A random model for ``NAMES`` and ``words`` whose chat template writes tool calls. Returns its directory."""
    model = make_model(output, (*_TAGS, *NAMES, *words))
    config = Path(model) / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8")) | {"chat_template": _TEMPLATE}
    config.write_text(json.dumps(values), encoding="utf-8")
    return model


def call(name: str, /, **parameters: str) -> str:
    """A tool call as the chat template renders it, which is the form that adapters parse without a named parser."""
    given = "".join(f"<parameter={key}>{value}</parameter>" for key, value in parameters.items())
    return f"<tool_call><function={name}>{given}</function></tool_call>"


def conversation(prompt: list[dict[str, str]], *turns: tuple[str, str]) -> dict[str, Any]:
    """A row for the warm start.

    Args:
        turns: (role, text) of all messages after the prompt. Those of the assistant are trained on.
    """
    # The opening of the next assistant message belongs to the masked part: the template writes it.
    segments = [
        [f"{text}{END}", 1]
        if role == "assistant"
        else [f"\n<|im_start|>{role}\n{text}{END}\n<|im_start|>assistant\n", 0]
        for role, text in turns
    ]
    return {"prompt": prompt, "metadata": {"segments": segments}}
