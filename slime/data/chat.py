"""Tokenizer, chat template, and special tokens in the text of messages.

A tokenizer encodes ``<|im_end|>`` as the token that ends a turn, even if the data only quote it. By default a warning
names the row. With ``--special-tokens-as-text`` such text is encoded as ordinary text: a mark replaces it while the
chat template is applied, and the prompt is encoded piece by piece. Special tokens of the template itself stay.

Called by the data source, the rollout and supervised training. Imports transformers on first use.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slime.utils.errors import DataError, named, translated

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

_TURN = "slime-assistant-turn"
"""Replaces the assistant's turn in a conversation whose other text is used."""


@functools.lru_cache(maxsize=8)
def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The checkpoint's tokenizer, loaded once per process and set of arguments.

    Raises:
        DataError: ``name_or_path`` holds no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        kind = "" if Path(name_or_path).is_dir() else " (there is no such directory)"
        raise DataError(f"--hf-checkpoint {name_or_path}{kind} has no usable tokenizer: {error}") from error


def render_chat(tokenizer: Any, messages: Messages, *, tools: list[Any] | None = None, **kwargs: Any) -> str:
    """Messages as the text the model reads, by the tokenizer's chat template.

    Args:
        kwargs: passed to the template; ``add_generation_prompt=True`` ends the text before the assistant's message.

    Raises:
        DataError: no chat template, or one that refuses the messages.
    """
    return cast(str, _apply(tokenizer, messages, tools=tools, tokenize=False, **kwargs))


def tokenize_chat(tokenizer: Any, messages: Messages, *, tools: list[Any] | None = None, **kwargs: Any) -> list[int]:
    """Like :func:`render_chat`, as token ids."""
    return list(_apply(tokenizer, messages, tools=tools, tokenize=True, return_dict=False, **kwargs))


def render_continuation(
    tokenizer: Any, messages: Messages, *, tokens: Sequence[int] = (), tools: list[Any] | None = None, **kwargs: Any
) -> str:
    """The text between a turn of the model and its next: the end of the turn, ``messages``, and the beginning.

    The turn itself is not rendered, so the sampled tokens stay as they are.

    Args:
        messages: tool results, or a message of the user.
        tokens: of the conversation so far. If the last one is the end token, the text begins after it.

    Raises:
        DataError: no chat template, one that refuses the messages, or one that leaves out the turn before them.
    """
    held = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}, *messages]
    text = render_chat(tokenizer, held, tools=tools, add_generation_prompt=True, **kwargs)
    _, mark, rest = text.rpartition(_TURN)
    if not mark:
        raise DataError("the chat template leaves out the assistant's turn before the last messages")
    has_end = len(tokens) > 0 and tokens[-1] == tokenizer.eos_token_id
    return rest.removeprefix(tokenizer.eos_token) if has_end else rest


def _apply(tokenizer: Any, messages: Messages, **kwargs: Any) -> Any:
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template: give a checkpoint that has "
            "one, or plain text prompts without --apply-chat-template"
        )
    # the template is a program of the checkpoint
    with translated(lambda error: DataError(f"the chat template refuses the messages: {named(error)}")):
        return tokenizer.apply_chat_template(list(messages), **kwargs)


# Marks around the number of a replaced token, from the private use area, which no template interprets.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class SpecialTokens:
    """The special tokens of one tokenizer. Sent to other processes, so it must be picklable.

    Args:
        as_text: encode those in messages as text.
    """

    def __init__(self, tokenizer: Any, *, as_text: bool) -> None:
        self._tokenizer = tokenizer
        self._as_text = as_text
        names = set(getattr(tokenizer, "all_special_tokens", ()) or ())
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        names |= {str(token) for token in added.values() if token.special}
        # Longest first: a regular expression takes the first alternative that matches.
        self._tokens = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._tokens))) if self._tokens else None

    def render(
        self, where: str, messages: Sequence[Mapping[str, Any]], render: Callable[[Any], str]
    ) -> tuple[str, list[int]]:
        """The prompt, and its ids if special tokens of the messages were encoded as text, else none.

        Args:
            render: applies the chat template to messages.
        """
        found: list[str] = []

        def mark(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"{_OPEN}{len(found) - 1}{_CLOSE}" if self._as_text else match[0]

        marked = [self._mark(message, mark) for message in messages]
        text = render(marked)
        if not found:
            return text, []
        if not self._as_text:
            # Without the number of the line: one warning per file and token.
            _warn_once(where.rpartition(":")[0], found[0], where)
            return text, []
        parts = re.split(f"{_OPEN}([0-9]+){_CLOSE}", text)
        parts[1::2] = [found[int(number)] for number in parts[1::2]]
        # Every second part is a special token that must be encoded as text.
        is_text = itertools.cycle([False, True])
        return "".join(parts), [i for part, plain in zip(parts, is_text, strict=False) for i in self._ids(part, plain)]

    def _mark(self, message: Mapping[str, Any], mark: Callable[[re.Match[str]], str]) -> Mapping[str, Any]:
        content = message.get("content")
        if isinstance(content, str) and self._pattern is not None and self._pattern.search(content):
            return {**message, "content": self._pattern.sub(mark, content)}
        if isinstance(content, list):
            return {**message, "content": [self._mark_part(part, mark) for part in content]}
        return message

    def _mark_part(self, part: Any, mark: Callable[[re.Match[str]], str]) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str) and self._pattern is not None:
            return {**part, "text": self._pattern.sub(mark, part["text"])}
        return part

    def _ids(self, text: str, is_plain: bool) -> list[int]:
        if not text:
            return []
        options = {"split_special_tokens": True} if is_plain else {}
        return list(self._tokenizer.encode(text, add_special_tokens=False, **options))


def _warn_once(file: str, token: str, where: str) -> None:
    if (file, token) in _warned:
        return
    _warned.add((file, token))
    logger.warning(
        "%s: the text of a message contains the special token %r, which is encoded as a control token and may end a "
        "turn; --special-tokens-as-text encodes it as text. Further rows with it are not listed",
        *(where, token),
    )


_warned: set[tuple[str, str]] = set()
"""(file, special token) that were reported by this process."""
