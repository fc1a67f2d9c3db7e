"""Texts of samples: search, prompts of a table, and texts of tokens. Called by ``run_data``."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slime.utils.errors import DataError, reported

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=4096)
def positions_with(path: Path, changed: int, text: str) -> frozenset[int]:
    """Samples of a file whose prompt, response or label has ``text``. ``changed``: time of the file's last change."""
    try:
        table = pq.read_table(path, columns=["position", "prompt", "response", "rest"])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    escaped = json.dumps(text)[1:-1]  # prompt and label are JSON
    has = functools.partial(pc.match_substring, ignore_case=True)
    in_text = pc.or_(has(table["response"], text), has(table["prompt"], escaped))
    found = set(table["position"].filter(in_text).to_pylist())
    # The label is one of several fields of this column.
    candidates = table.filter(has(table["rest"], escaped)).select(["position", "rest"]).to_pylist()
    labels = {row["position"]: json.loads(row["rest"]).get("label") or "" for row in candidates}
    found |= {position for position, label in labels.items() if text.lower() in str(label).lower()}
    return frozenset(found)


def prompt_text(stored: str) -> str:
    """Text or messages of a recorded prompt as one text."""
    prompt = json.loads(stored)
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(str(message.get("content")) if isinstance(message, dict) else str(message) for message in prompt)


def without_common(texts: list[str]) -> list[str]:
    """The parts in which prompts differ: without the words that all of them begin and end with."""
    different = set(texts)
    if len(different) < 2:
        return texts
    prefix, suffix = _common(different), _common({text[::-1] for text in different})[::-1]
    # Whole words and special tokens only: 12+34 and 17+20 begin with the same digit.
    start = max((place.end() for place in re.finditer(r"[\s>]", prefix)), default=0)
    first = re.search(r"[\s<]", suffix)
    end = len(suffix) - first.start() if first else 0
    return [text[start : max(start, len(text) - end)] for text in texts]


def _common(texts: set[str]) -> str:
    """The longest common beginning."""
    # If the first and the last in their order share it, all others do.
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# Decoders return it for an incomplete character.
_HALF = "\ufffd"


class TokenTexts:
    """Texts of token ids, from the tokenizer's file: importing transformers takes seconds.

    A ``checkpoint`` folder without ``tokenizer.json`` shows ids instead."""

    def __init__(self, checkpoint: str | None) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def _tokenizer(self) -> Any:
        path = Path(self._checkpoint or "") / "tokenizer.json"
        with reported(lambda error: logger.warning("%s cannot be read, tokens are shown as numbers: %s", path, error)):
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
        return None

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text per token. A character of several tokens is at the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        texts: list[str] = []
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            text = self._tokenizer.decode(pending, skip_special_tokens=False)
            # A character has at most four bytes, and each token has at least one.
            if text.endswith(_HALF) and len(pending) < 4:
                texts.append("")
                continue
            # decoding a single token may strip its leading blank
            texts.append(self._with_blanks(token) if len(pending) == 1 else text)
            pending = []
        if pending:
            texts[-1] = self._tokenizer.decode(pending, skip_special_tokens=False)
        return texts

    def _with_blanks(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        # SentencePiece marks a leading blank with U+2581, and decoding removes it.
        piece = self._tokenizer.id_to_token(token) or ""
        return " " + text if piece.startswith("\u2581") and not text.startswith(" ") else text
