"""Tokenizer and chat template. Called by the data source, the rollout and supervised training; transformers loads here.

Knows nothing of samples, files or flags.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slime.utils.errors import DataError

Messages = Sequence[Mapping[str, Any]]

_TURN = "slime-assistant-turn"
"""Stands for the assistant's turn in a conversation of which only the rest is wanted."""


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
    if not getattr(tokenizer, "chat_template", True):
        raise DataError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template: give a checkpoint that has "
            "one, or plain text prompts without --apply-chat-template"
        )
    try:
        return tokenizer.apply_chat_template(list(messages), **kwargs)
    except Exception as error:  # the template is a program of the checkpoint and raises what it likes
        raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
