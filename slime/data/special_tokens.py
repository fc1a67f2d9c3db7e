"""Special tokens in the text of a message: a tokenizer encodes ``<|im_end|>`` as the token that ends a turn, also where
the data only quote it.

By default the row is named in a warning. With ``--special-tokens-as-text`` the text is encoded as ordinary text: it is
replaced by a mark while the chat template is applied, and the prompt is encoded piece by piece. Text that the template
adds keeps its special tokens. Called where rows become prompts.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
"""Around the number of a replaced token; of the private use area, which no template and no text interprets."""


class SpecialTokens:
    """Of one tokenizer; travels to other processes.

    Args:
        as_text: encode those in messages as text.
    """

    def __init__(self, tokenizer: Any, *, as_text: bool) -> None:
        self._tokenizer = tokenizer
        self._as_text = as_text
        names = set(getattr(tokenizer, "all_special_tokens", ()) or ())
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        names |= {str(token) for token in added.values() if getattr(token, "special", False)}
        self._tokens = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._tokens))) if self._tokens else None

    def render(
        self, where: str, messages: Sequence[Mapping[str, Any]], render: Callable[[Any], str]
    ) -> tuple[str, list[int]]:
        """The prompt, and its ids where special tokens of the messages were encoded as text, else none.

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
            _warn_once(where.rpartition(":")[0], found[0], where)
            return text, []
        parts = re.split(f"{_OPEN}([0-9]+){_CLOSE}", text)
        parts[1::2] = [found[int(number)] for number in parts[1::2]]
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
