"""Tokenizer and chat template. Called by the data source, the rollout and supervised training; transformers loads here.

Knows nothing of samples, files or flags.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slime.utils.errors import DataError

__all__ = ["load_tokenizer", "render_chat", "tokenize_chat"]

Messages = Sequence[Mapping[str, Any]]


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
        kwargs: passed to the template; ``add_generation_prompt=True`` ends the text where the assistant begins.

    Raises:
        DataError: no chat template, or one that refuses the messages.
    """
    return cast(str, _apply(tokenizer, messages, tools=tools, tokenize=False, **kwargs))


def tokenize_chat(tokenizer: Any, messages: Messages, *, tools: list[Any] | None = None, **kwargs: Any) -> list[int]:
    """Like :func:`render_chat`, as token ids."""
    return list(_apply(tokenizer, messages, tools=tools, tokenize=True, return_dict=False, **kwargs))


def _apply(tokenizer: Any, messages: Messages, **kwargs: Any) -> Any:
    if not getattr(tokenizer, "chat_template", True):
        raise DataError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template: give a checkpoint that has "
            "one, or plain text prompts without --apply-chat-template"
        )
    try:
        return tokenizer.apply_chat_template(list(messages), **kwargs)
    except Exception as error:  # the template is a program of the checkpoint and raises what it likes
        raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
