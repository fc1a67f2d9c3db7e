"""A tokenizer that other processes can build without transformers: a token per character."""

from __future__ import annotations

import os
from typing import Any


class PlainTokenizer:
    """``poison`` is a text that ends the process that tokenizes it."""

    chat_template = "plain"

    def __init__(self, poison: str | None = None) -> None:
        self.poison = poison

    def __call__(self, texts: list[str], add_special_tokens: bool = False) -> dict[str, Any]:
        if self.poison in texts:
            os._exit(3)
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)
