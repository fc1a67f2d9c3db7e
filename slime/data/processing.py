"""Tokenizer, chat template and processor: messages with images, videos and audio become input of engine and trainer.

    row {"images": [...]} + "<image>"  --expand_media-->        message items {"type": "image", "image": ...}
    messages                           --process_vision_info--> {"images": [PIL], "videos": [...] | None}
    rendered text + media              --run_processor-->       prompt ids, and inputs of the trainer
    PIL image                          --encode_image...-->     data URI in the engine's request

Tokenizer, chat template, and special tokens in the text of messages.

A tokenizer encodes ``<|im_end|>`` as the token that ends a turn, even if the data only quote it. By default a warning
names the row. With ``--special-tokens-as-text`` such text is encoded as ordinary text: a mark replaces it while the
chat template is applied, and the prompt is encoded piece by piece. Special tokens of the template itself stay.

Called by the data source, the rollout and supervised training. PIL and transformers load on first use.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import itertools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slime.utils.accelerator import allow_torchvision_on_cpu
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


DEFAULT_PATCH_SIZE = 14
"""For vision encoders whose processor does not name one."""

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

Message = dict[str, Any]


@dataclass(frozen=True)
class MultimodalType:
    """A kind of media, and the placeholder of one item in a prompt."""

    name: str
    placeholder: str


class MultimodalTypes:
    """All kinds of media."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """The kind of that name, or None."""
        return next((kind for kind in cls.all() if kind.name == name), None)


def has_media(inputs: Mapping[str, Any] | None) -> bool:
    """Whether a sample's ``multimodal_inputs`` hold anything besides text."""
    return any(value is not None for value in (inputs or {}).values())


def expand_media(
    where: str, messages: Sequence[Message], row: Mapping[str, Any], keys: Mapping[str, str]
) -> list[Message]:
    """Put the media of a row where its messages have placeholders. The row's messages stay unchanged.

    Args:
        where: file and line, for errors.
        keys: kind of media -> row field with a list of them (``--multimodal-keys``).

    Raises:
        DataError: unknown kinds, or not as many placeholders as media.
    """
    waiting: dict[str, tuple[MultimodalType, list[Any]]] = {}
    for name, key in keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            known = ", ".join(kind.name for kind in MultimodalTypes.all())
            raise DataError(f"--multimodal-keys: {name!r} is no kind of media; use {known}")
        if row.get(key) is not None:
            items = row[key]
            waiting[kind.placeholder] = (kind, list(items) if isinstance(items, list | tuple) else [items])
    if not waiting:
        return list(messages)
    given = {placeholder: len(items) for placeholder, (_, items) in waiting.items()}
    pattern = re.compile("(" + "|".join(map(re.escape, waiting)) + ")")
    expanded = [message | {"content": _expand(where, message.get("content"), pattern, waiting)} for message in messages]
    left = {placeholder: len(items) for placeholder, (_, items) in waiting.items() if items}
    if left:
        text = ", ".join(f"{given[name]} {name} given, {given[name] - n} in the prompt" for name, n in left.items())
        raise DataError(f"{where}: placeholders and media do not match (--multimodal-keys): {text}")
    return expanded


def _expand(
    where: str, content: Any, pattern: re.Pattern[str], waiting: Mapping[str, tuple[MultimodalType, list[Any]]]
) -> Any:
    if not isinstance(content, str):
        return content  # items already: a row has one style or the other
    items: list[Any] = []
    for part in pattern.split(content):
        if part in waiting:
            kind, media = waiting[part]
            if not media:
                raise DataError(f"{where}: there are more {part} in the prompt than media in the row")
            item = media.pop(0)
            # Parquet's images, {"bytes", "path"}, are the media themselves.
            is_rich = isinstance(item, dict) and not item.keys().isdisjoint(("type", kind.name, f"{kind.name}_url"))
            items.append({"type": kind.name, **(item if is_rich else {kind.name: item})})
        elif part:
            items.append({"type": "text", "text": part})
    return items


def process_vision_info(prompt: Sequence[Message], processor: Any) -> dict[str, Any]:
    """The images and videos of messages, loaded: ``{"images": [PIL] | None, "videos": [...] | None}``.

    With the package ``qwen_vl_utils`` images get the size that the model expects, and videos can be read. Without it
    images stay unchanged.

    Raises:
        DataError: media that cannot be read, or a video without that package.
    """
    try:
        from qwen_vl_utils import process_vision_info as of_qwen
    except ImportError:
        return {"images": _images_of(prompt) or None, "videos": None}
    patch = getattr(getattr(processor, "image_processor", None), "patch_size", DEFAULT_PATCH_SIZE)
    with translated(lambda error: DataError(f"media cannot be read: {named(error)}")):
        images, videos = of_qwen(list(prompt), image_patch_size=patch)
    return {"images": images, "videos": videos}


def _images_of(messages: Sequence[Message]) -> list[Any]:
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        for item in content if isinstance(content, list) else []:
            match item.get("type") if isinstance(item, dict) else None:
                case "image" | "image_url":
                    images.append(_open_image(item.get("image", item.get("image_url"))))
                case "video" | "audio" as kind:
                    raise DataError(f"reading {kind} needs the package qwen_vl_utils (pip install qwen-vl-utils)")
                case _:
                    continue
    return images


def _open_image(source: Any) -> Any:
    """PIL image of a row's value: PIL, a path, ``file://``, a data URI, base64, bytes, or ``{"bytes": ...}``."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, Mapping):
        source = next((source[key] for key in ("bytes", "path", "url", "image") if source.get(key)), None)
    try:
        if isinstance(source, str):
            path = source.removeprefix("file://")
            is_path = os.path.isfile(path)  # False, not an error, for text that is too long for a path
            source = Path(path).read_bytes() if is_path else _decoded(source)
        with Image.open(io.BytesIO(source)) as image:
            return image.convert("RGB")
    except (TypeError, ValueError, OSError, UnidentifiedImageError) as error:
        raise DataError(f"{str(source)[:80]!r} is no image, and no file with one: {error}") from None


def _decoded(text: str) -> bytes:
    """Base64, with or without the head of a data URI."""
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"neither a file nor base64 ({error})") from None


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as ``data:image/png;base64,...``: the form of the engine's ``image_data``. Lossless."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a processor besides the text: ids as lists, everything else as tensors."""
    kwargs: dict[str, Any] = dict(multimodal_inputs or {})
    kwargs["text_kwargs"] = dict(kwargs.get("text_kwargs") or {}) | {
        "return_tensors": None,
        "return_mm_token_type_ids": False,
    }
    for name in ("audio_kwargs", "images_kwargs", "videos_kwargs"):
        kwargs[name] = dict(kwargs.get(name) or {}) | {"return_tensors": "pt"}
    return kwargs


def run_processor(processor: Any, text: str, inputs: Mapping[str, Any]) -> tuple[list[int], dict[str, Any] | None]:
    """Prompt ids with the media's places filled in, and the processor's other outputs (``pixel_values`` ...).

    Raises:
        DataError: a processor that refuses them.
    """
    # the processor is a program of the checkpoint
    with translated(lambda error: DataError(f"the processor refuses the prompt: {named(error)}")):
        output = processor(text=text, **build_processor_kwargs(inputs))
    ids = output["input_ids"][0]
    rest = {name: value for name, value in output.items() if name not in ("input_ids", "attention_mask")}
    return [int(i) for i in ids], rest or None


def with_single_placeholders(processor: Any, ids: Sequence[int]) -> list[int]:
    """Token ids with one token per image. The engine repeats it as often as the image needs."""
    kinds = {getattr(processor, f"{name}_token_id", None) for name in ("image", "video")}
    # A run of equal placeholders is one image: templates put other tokens between two images.
    return [token for before, token in zip((None, *ids), ids, strict=False) if token != before or token not in kinds]


@functools.lru_cache(maxsize=8)
def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """The checkpoint's processor for images and text, once per process. None for a text-only checkpoint.

    Raises:
        DataError: the checkpoint has a processor that cannot be loaded.
    """
    folder = Path(name_or_path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        # A text-only checkpoint: transformers need not be imported.
        return None
    allow_torchvision_on_cpu()
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"--hf-checkpoint {name_or_path} has no usable processor: {error}") from error
    # AutoProcessor returns the tokenizer of some text-only checkpoints.
    return processor if isinstance(processor, ProcessorMixin) else None


def media_to_state(inputs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``multimodal_inputs`` for a file: images as text."""
    return _with_images(inputs, encode_image_for_rollout_engine)


def media_from_state(inputs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The inverse of :func:`media_to_state`."""
    return _with_images(inputs, _open_image)


def _with_images(inputs: Mapping[str, Any] | None, convert: Callable[[Any], Any]) -> dict[str, Any] | None:
    images = (inputs or {}).get("images")
    changed = {"images": [convert(image) for image in images]} if images else {}
    return None if inputs is None else dict(inputs) | changed
