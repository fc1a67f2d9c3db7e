"""Token ids as texts, with the model's own tokenizer file and without the weight of transformers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["TokenTexts"]

logger = logging.getLogger(__name__)

_HALF = "\ufffd"
"""What a part of a character is decoded to."""


class TokenTexts:
    """``checkpoint`` is the folder of the model; where it holds no ``tokenizer.json`` a token is shown as its id."""

    def __init__(self, checkpoint: str | None) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def _tokenizer(self) -> Any:
        path = Path(self._checkpoint or "") / "tokenizer.json"
        try:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            logger.warning("%s cannot be read, tokens are shown as numbers: %s", path, error)
            return None

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text per token. Characters that several tokens share stand at the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        texts: list[str] = []
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            text = self._tokenizer.decode(pending, skip_special_tokens=False)
            if text.endswith(_HALF) and len(pending) < 4:
                texts.append("")
                continue
            # a decoder that strips leading blanks would lose them: compare with a neighbour in front
            texts.append(self._with_blanks(token) if len(pending) == 1 else text)
            pending = []
        if pending:
            texts[-1] = self._tokenizer.decode(pending, skip_special_tokens=False)
        return texts

    def _with_blanks(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        piece = self._tokenizer.id_to_token(token) or ""
        return " " + text if piece.startswith("\u2581") and not text.startswith(" ") else text
