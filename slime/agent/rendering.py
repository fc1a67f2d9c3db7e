"""Token ids of a conversation: earlier turns keep the tokens that the engine sampled, only new messages are rendered.

    prompt ids of the last turn + its sampled ids + [end of the turn, new messages, beginning of the next turn]

The chat template writes the part in brackets for a short conversation: system messages, the last question, one earlier
step, the last turn, and the new messages. So a turn costs as much as its new messages, however long the history is. The
short conversation also shows whether the template would write the earlier part differently now, for example without
its thoughts. Then the whole conversation is rendered, and the turn records the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.trajectory import Message, MessageNode, TurnRecord
from slime.data.processing import render_chat
from slime.utils.errors import DataError

History = list[tuple[Message, TurnRecord | None]]
"""The recorded messages that a conversation begins with, up to the engine's last turn among them."""

# Replace the parts of the last turn, so that they are found in the rendered text.
_THOUGHTS, _TEXT, _CALL = "slime-marks-thoughts", "slime-marks-text", "slime-marks-a-call"
_MARKS = {_THOUGHTS: "thoughts", _TEXT: "text", _CALL: "tool calls"}


class _Changed(Exception):
    """The reason for rendering the whole conversation."""


def history(path: Sequence[MessageNode]) -> History:
    """The messages of ``path`` up to its last turn. A copy, because other requests may change the nodes."""
    end = next((i + 1 for i in reversed(range(len(path))) if path[i].turn is not None), 0)
    return [(node.message or {}, node.turn) for node in path[:end]]


class TurnRenderer:
    """Renders the prompts of one tokenizer. Called from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special: frozenset[int] | None = None

    def prompt_ids(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, held: History | None = None
    ) -> tuple[list[int], str]:
        """The ids of ``messages`` and of the beginning of the next turn.

        Args:
            held: the recorded beginning of ``messages``.

        Returns:
            The ids, and the reason if the whole conversation was rendered although an earlier turn has tokens, else "".
        """
        reason = ""
        if held and (turn := held[-1][1]) is not None:
            try:
                return turn.prompt_ids + turn.output_ids + self._after(turn, messages[len(held) :], tools, held), ""
            except (_Changed, DataError) as error:
                reason = str(error)
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, add_generation_prompt=True
        )
        # Newer transformers return a mapping.
        ids = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
        return [int(token) for token in ids], reason

    def _after(
        self, turn: TurnRecord, new: Sequence[Message], tools: list[dict[str, Any]] | None, held: History
    ) -> list[int]:
        """The ids between the sampled ones of ``turn`` and the next sampled ones."""
        special = self._special_ids()
        if not special:
            raise _Changed("the tokenizer has no special tokens, which end a turn")
        if turn.tools != tools:
            raise _Changed("the client changed the tools")
        if not turn.is_shown:
            raise _Changed("the reply left out a part of the turn")
        text = self._text_after(_shortened(held[:-1]), _marked(held[-1][0], turn), new, tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        last = turn.output_ids[-1] if turn.output_ids else None
        # A turn that was cut off has no end token: the template's is added. A special token separates the ids before
        # it from those after it, so encoding them apart gives the ids of the whole text.
        ends = special if last not in special else {last}
        begin = next((i for i, token in enumerate(ids) if token in ends), None)
        if begin is None:
            raise _Changed(f"the template does not end a turn with {'a special token' if ends is special else last}")
        return list(ids[begin if ends is special else begin + 1 :])

    def _text_after(
        self, earlier: list[Message], reply: Message, new: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> str:
        """The template's text after the last mark of ``reply``.

        Raises:
            _Changed: with ``new``, it does not write ``earlier`` or ``reply`` as it did before.
        """
        before = render_chat(self._tokenizer, earlier, tools=tools, add_generation_prompt=True)
        whole = render_chat(self._tokenizer, [*earlier, reply, *new], tools=tools, add_generation_prompt=True)
        if not whole.startswith(before):
            raise _Changed("the template changes the text before a turn when messages follow")
        rest, end = whole[len(before) :], 0
        for mark, part in _MARKS.items():
            if rest.count(mark) != str(reply).count(mark):
                raise _Changed(f"the template leaves out the {part} of an earlier turn")
            if mark in rest:
                end = max(end, rest.rindex(mark) + len(mark))
        return rest[end:]

    def _special_ids(self) -> frozenset[int]:
        if self._special is None:
            try:
                added = self._tokenizer.added_tokens_decoder.items()
                self._special = frozenset(token for token, value in added if value.special)
            except AttributeError:  # not a tokenizer of transformers
                self._special = frozenset()
        return self._special


def _shortened(earlier: History) -> list[Message]:
    """System messages, the last question, and one step of the agent after it, if possible one with thoughts."""
    roles = [message.get("role") for message, _ in earlier]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    question = next((i for i in reversed(range(first, len(roles))) if roles[i] == "user"), first - 1)
    steps = [i for i in range(question + 1, len(roles)) if roles[i] == "assistant"]
    thinking = [i for i in steps if (turn := earlier[i][1]) is not None and turn.has_thoughts]
    step = max(thinking or steps or [len(roles)])
    end = next((i for i in steps if i > step), len(roles))
    kept = [*earlier[:first], *earlier[max(question, first) : question + 1], *earlier[step:end]]
    return [_with_thoughts(message, turn) for message, turn in kept]


def _with_thoughts(message: Message, turn: TurnRecord | None) -> Message:
    # Clients need not send thoughts back, but the sampled tokens have them.
    return message | {"reasoning_content": _THOUGHTS} if turn is not None and turn.has_thoughts else message


def _marked(reply: Message, turn: TurnRecord) -> Message:
    """``reply`` with marks for its parts. The names of tools are kept: templates repeat them in results."""
    marked = _with_thoughts({key: value for key, value in reply.items() if key != "reasoning_content"}, turn)
    if marked.get("content"):
        marked["content"] = _TEXT
    if marked.get("tool_calls"):
        marked["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": {"value": _CALL}}} for call in marked["tool_calls"]
        ]
    return marked
