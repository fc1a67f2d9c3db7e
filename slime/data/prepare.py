"""Make prompts of rows: fields, chat template, token count. In this process, or ahead of their use in others.

Called by ``prompts``. The results keep the order of the rows.

    rows --chunks--> worker 0 \\
                     worker 1  > results in the order of the rows; at most 2 chunks per worker are under way
                     ...      /
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime.data.processing import (
    SpecialTokens,
    expand_media,
    has_media,
    process_vision_info,
    render_chat,
    run_processor,
)
from slime.data.sample import Sample
from slime.data.values import Array, check_label, parse_json
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
Placed: TypeAlias = tuple[str, Row]
"""A row and its place, for error messages."""

# Characters. From this length on a lower bound is tried first, because tokenizing may take minutes.
_LONG_TEXT = 1_000_000
# Characters of a prompt that no length limit drops. More are an error.
_LONGEST_UNMEASURED = 16_000_000
_CHUNK = 64
_CHUNKS_AHEAD = 2
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Prepared:
    """A prompt and its length, which is None if it was not measured."""

    sample: Sample
    num_tokens: int | None


@dataclass(frozen=True)
class PromptMaker:
    """The settings for all rows of a file. Sent to other processes.

    Attributes:
        tokenizer: needed for templates and for measuring.
        processor: of the checkpoint, needed for media.
        max_length: prompts with more tokens are dropped. A text that must have more is not tokenized to be measured.
            None measures no prompt.
        multimodal_keys: kind of media -> row field. None for prompts that are text only.
        special_tokens_as_text: encode special tokens in messages as text.
        label_is_optional: rows may lack the label, because no flag asked for it.
    """

    tokenizer: Any
    processor: Any = None
    max_length: int | None = None
    prompt_key: str = "text"
    multimodal_keys: dict[str, str] | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] | None = None
    special_tokens_as_text: bool = False
    label_is_optional: bool = False

    def make(self, rows: Sequence[Placed]) -> list[Prepared]:
        """The prompts of some rows.

        Raises:
            DataError: a row without prompt or label, or one of the wrong type, with its line.
        """
        samples = [self._sample(where, row) for where, row in rows]
        for (where, _), sample in zip(rows, samples, strict=True):
            is_long = isinstance(sample.prompt, str) and len(sample.prompt) > _LONGEST_UNMEASURED
            if is_long and self.max_length is None and self.tokenizer is not None:
                raise DataError(
                    f"{where}: the prompt has {len(sample.prompt)} characters, and no limit drops it: use "
                    "--rollout-max-prompt-len (--eval-max-prompt-len for evaluation)"
                )
        if self.max_length is None:
            return [Prepared(sample, None) for sample in samples]
        return [
            Prepared(sample, length)
            for sample, length in zip(
                samples, prompt_lengths(samples, self.tokenizer, self.processor, self.max_length), strict=True
            )
        ]

    def _sample(self, where: str, row: Row) -> Sample:
        metadata = _metadata(where, row, self.metadata_key)
        tools = _tools(where, row, self.tool_key)
        if tools is not None:
            metadata["tools"] = tools
        key = self.prompt_key
        prompt = field_of(where, row, key, "--input-key")
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
            messages = prompt
        elif not self.apply_chat_template and self.multimodal_keys is None:
            messages = []  # a custom generate function reads it, such as the number of a task
        else:
            raise DataError(
                f"{where}: {key!r} must be text or a list of messages for the chat template and for media, not "
                f"{type(prompt).__name__}"
            )
        media = None
        if self.multimodal_keys is not None:
            messages = expand_media(where, messages, row, self.multimodal_keys)
            media = self._media(where, messages)
            prompt = messages
        ids: list[int] = []
        if self.apply_chat_template:
            prompt, ids = self._render(where, messages, tools)
        label = None
        if self.label_key is not None:
            key = self.label_key
            value = row.get(key) if self.label_is_optional else field_of(where, row, key, "--label-key")
            label = check_label(where, key, value)
        return Sample(prompt=prompt, tokens=ids, label=label, metadata=metadata, multimodal_inputs=media)

    def _render(self, where: str, messages: Sequence[Any], tools: list[Any] | None) -> tuple[str, list[int]]:
        """The prompt, and its ids if they differ from those of its text."""
        kwargs = {"add_generation_prompt": True} | (self.apply_chat_template_kwargs or {})

        def render(messages: Sequence[Any]) -> str:
            return render_chat(self._renderer, messages, tools=tools, **kwargs)

        try:
            if self.multimodal_keys is not None:  # placeholders of media are special tokens
                return render(messages), []
            return self._special_tokens.render(where, messages, render)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    @functools.cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer, as_text=self.special_tokens_as_text)

    @property
    def _renderer(self) -> Any:
        """The object with the chat template. Of some models with vision only the processor has one."""
        needs_processor = self.processor is not None and not self.tokenizer.chat_template
        return self.processor if needs_processor else self.tokenizer

    def _media(self, where: str, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            media = process_vision_info(messages, self.processor)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        return media if has_media(media) else None


def prompt_lengths(
    samples: Sequence[Sample], tokenizer: Any, processor: Any = None, max_length: int | None = None
) -> list[int | None]:
    """Tokens of each prompt, with those of its media. None for message lists, which are not rendered yet.

    Args:
        max_length: a text that is certainly longer is not tokenized, which may take minutes. It gets a lower bound.
    """
    bounds = [_least_tokens(sample, tokenizer, max_length) for sample in samples]
    plain = [
        s
        for s, bound in zip(samples, bounds, strict=True)
        if bound is None and isinstance(s.prompt, str) and not has_media(s.multimodal_inputs)
    ]
    of_plain = iter(count_tokens(tokenizer, [str(sample.prompt) for sample in plain]))
    lengths: list[int | None] = []
    for sample, bound in zip(samples, bounds, strict=True):
        if bound is not None or not isinstance(sample.prompt, str):
            lengths.append(bound)
        elif has_media(sample.multimodal_inputs):
            lengths.append(len(run_processor(processor, sample.prompt, sample.multimodal_inputs or {})[0]))
        else:
            lengths.append(next(of_plain))
    return lengths


def _least_tokens(sample: Sample, tokenizer: Any, max_length: int | None) -> int | None:
    """The tokens of a prompt that has ids, or a lower bound of a text that must exceed ``max_length``, else None."""
    if sample.tokens:
        return len(sample.tokens)
    if max_length is None or not isinstance(sample.prompt, str) or len(sample.prompt) < _LONG_TEXT:
        return None
    # No token is longer than the longest entry of the vocabulary.
    bound = len(sample.prompt) // max(map(len, tokenizer.get_vocab()), default=1)
    return bound if bound > max_length else None


def count_tokens(tokenizer: Any, texts: list[str]) -> list[int]:
    """Tokens of each text, without special ones."""
    if not texts:
        return []
    ids: Sequence[Sequence[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [len(row) for row in ids]


def prepare(rows: Iterable[Placed], maker: PromptMaker, num_workers: int = 0) -> Iterator[Prepared]:
    """The prompts of ``rows``, in their order.

    Args:
        num_workers: processes that prepare rows ahead of their use. 0 does it here. They end with the iterator.

    Raises:
        DataError: see :meth:`PromptMaker.make`. Also if a worker died or made no progress.
    """
    chunks = _chunks(iter(rows))
    if num_workers == 0:
        for chunk in chunks:
            yield from maker.make(chunk)
        return
    # spawned, because this process has threads (Ray's) that a fork would tear apart
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _start_worker, (maker,))
    try:
        ahead: deque[Future[list[Prepared]]] = deque()
        for chunk in chunks:
            ahead.append(pool.submit(_work, chunk))
            # Bounded: rows must not be read far ahead of their use.
            if len(ahead) == _CHUNKS_AHEAD * num_workers:
                yield from _result(ahead.popleft())
        while ahead:
            yield from _result(ahead.popleft())
    finally:
        # Without waiting: a worker may be in the middle of a long text.
        pool.shutdown(wait=False, cancel_futures=True)


def _chunks(rows: Iterator[Placed]) -> Iterator[list[Placed]]:
    while chunk := list(itertools.islice(rows, _CHUNK)):
        yield chunk


def _result(future: Future[list[Prepared]]) -> list[Prepared]:
    try:
        return future.result(timeout=_TIMEOUT_S)
    except BrokenProcessPool as error:
        raise DataError("a process of --num-data-workers died; it may have run out of memory: use fewer") from error
    except FutureTimeout:
        raise DataError(f"--num-data-workers: {_CHUNK} prompts were not prepared within {_TIMEOUT_S:.0f} s") from None


_make: Callable[[Sequence[Placed]], list[Prepared]] | None = None
"""Of a worker process, set once at its start."""


def _start_worker(maker: PromptMaker) -> None:
    global _make
    _make = maker.make
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker only"
    # A parent that was killed closes no queue, and its workers would wait for ever.
    parent.join()
    # sys.exit would end this thread only.
    os._exit(1)


def _work(chunk: Sequence[Placed]) -> list[Prepared]:
    assert _make is not None, "the pool calls _start_worker first"
    return _make(chunk)


def field_of(where: str, row: Row, key: str, flag: str) -> Any:
    """``row[key]``. A row without it, or without a prompt, is an error that names ``flag``."""
    if key not in row or (flag == "--input-key" and row[key] is None):
        names = ", ".join(map(repr, row)) or "(none)"
        raise DataError(f"{where}: there is no {key!r} ({flag}) in this row; its keys are {names}")
    return row[key]


def _metadata(where: str, row: Row, key: str) -> dict[str, Any]:
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(f"{where}: {key!r} (--metadata-key) looks like JSON", value)
    if isinstance(value, dict):
        return dict(value)
    if value:
        _warn_of_metadata(where.rpartition(":")[0], key, type(value).__name__)
    return {}


@functools.cache
def _warn_of_metadata(file: str, key: str, kind: str) -> None:
    logger.warning("%s: %r (--metadata-key) is a %s in some rows, not an object: it is left out", file, key, kind)


def _tools(where: str, row: Row, key: str | None) -> list[Any] | None:
    value = None if key is None else row.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        value = parse_json(f"{where}: {key!r} (--tool-key)", value)
    if isinstance(value, Array):  # of Parquet
        value = value.tolist()
    if not isinstance(value, list):
        raise DataError(f"{where}: {key!r} (--tool-key) must be a list of tools, not {type(value).__name__}")
    return value
