"""Responses to the same prompts from earlier in the run, as drafts of the next ones."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

_MOST_PER_PROMPT = 32
_CONTEXT = 3  # tokens that a place in a response has in common with the sequence
_BYTES = array("i").itemsize
# A sequence whose drafts fail this often in a row gets no more of them.
_MOST_MISSES = 3
# A search reads all responses to the prompt. One for each token would take longer than the model does.
_LONGEST_PAUSE = 64


@dataclass
class Cursor:
    """The place of one sequence in its prompt's responses.

    Attributes:
        source: response that the last draft was taken from.
        at: index in it of the next token of the sequence.
        width: tokens of the next draft. Doubles after a draft that was accepted as a whole.
        misses: drafts in a row of which no token was accepted.
        pause: tokens until the responses are searched again. ``next_pause`` doubles if a search finds nothing.
    """

    key: bytes
    source: array[int] | None = None
    at: int = 0
    width: int = 2
    misses: int = 0
    pause: int = 0
    next_pause: int = 1


@dataclass
class History:
    """Responses by prompt, newest first. The oldest prompts are forgotten.

    Args:
        most_tokens: number of tokens that are kept, four bytes each.
    """

    most_tokens: int
    num_tokens: int = 0
    _prompts: OrderedDict[bytes, list[array[int]]] = field(default_factory=OrderedDict)

    def begin(self, prompt: Sequence[int]) -> Cursor:
        """The cursor of a new sequence."""
        return Cursor(blake2b(array("i", prompt).tobytes(), digest_size=16).digest())

    def add(self, cursor: Cursor, response: Sequence[int]) -> None:
        """Remember the response of a finished sequence, once."""
        found = self._prompts.setdefault(cursor.key, [])
        self._prompts.move_to_end(cursor.key)
        new = array("i", response)
        if new in found:
            found.remove(new)
            self.num_tokens -= len(new)
        found.insert(0, new)
        self.num_tokens += len(new)
        if len(found) > _MOST_PER_PROMPT:
            self.num_tokens -= len(found.pop())
        while self.num_tokens > self.most_tokens:
            _, oldest = self._prompts.popitem(last=False)
            self.num_tokens -= sum(map(len, oldest))

    def draft(self, cursor: Cursor, response: array[int], room: int) -> Sequence[int]:
        """At most ``room`` tokens that may follow the unfinished ``response``. Often none."""
        if cursor.misses >= _MOST_MISSES or room <= 0:
            return ()
        source = cursor.source
        if source is None or cursor.at >= len(source) or source[cursor.at - 1] != response[-1]:
            source = self._search(cursor, response)
        if source is None:
            return ()
        return source[cursor.at : cursor.at + min(room, cursor.width)]

    def note(self, cursor: Cursor, drafted: int, accepted: int) -> None:
        """Note how many of the ``drafted`` tokens the model sampled as well."""
        cursor.at += accepted + 1
        if drafted:
            cursor.misses = 0 if accepted else cursor.misses + 1
            cursor.next_pause = 1 if accepted else cursor.next_pause
            cursor.width = 2 * cursor.width if accepted == drafted else accepted + 1

    def _search(self, cursor: Cursor, response: array[int]) -> array[int] | None:
        cursor.source = None
        cursor.pause -= 1
        if cursor.pause < 0:
            self._find(cursor, response)
            if cursor.source is None:
                cursor.pause, cursor.next_pause = cursor.next_pause, min(2 * cursor.next_pause, _LONGEST_PAUSE)
        return cursor.source

    def _find(self, cursor: Cursor, response: array[int]) -> None:
        responses = self._prompts.get(cursor.key, ())
        for source in responses:
            if len(source) > len(response) and source[: len(response)] == response:
                cursor.source, cursor.at = source, len(response)
                return
        tail = array("i", response[-_CONTEXT:]).tobytes()
        for source in responses:
            at = source.tobytes().find(tail)
            end = at + len(tail)
            if at >= 0 and at % _BYTES == 0 and end // _BYTES < len(source):
                cursor.source, cursor.at = source, end // _BYTES
                return
