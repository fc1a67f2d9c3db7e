"""Prompt files: JSONL and Parquet rows become prompts, loaded at once or as a stream.

Called by the data source and by evaluation. Every error names file, line and key.

:class:`StreamingDataset` (``--streaming-data``):

    file --rows--> [shuffle buffer] --> prepared ahead (--num-data-workers) --> too long? --> drawn
"""

from __future__ import annotations

import codecs
import functools
import itertools
import logging
import random
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from slime.data.prepare import Placed, Prepared, PromptMaker, Row, prepare, prompt_lengths
from slime.data.sample import Sample
from slime.data.values import parse_json, plain_value
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

_SLICE = re.compile(r"^(.*)@\[(-?\d*):(-?\d*)\]$", re.DOTALL)
_SUFFIXES = (".jsonl", ".parquet")
_FALLBACK_PROMPT_KEYS = {"input": ("prompt", "text"), "text": ("prompt", "input")}
_DEFAULT_LABEL_KEY = "label"
# Types of Parquet columns.
_NOT_JSON = ("timestamp", "date", "time", "decimal", "duration")
_NOT_MEASURED = "prompts are message lists, so none is dropped for its length; use --apply-chat-template"
_CHECK_ALL_BELOW_BYTES = 64 * 1024**2


class _MissingFile(DataError, FileNotFoundError):
    """Both, because callers of ``read_file`` may catch either."""


def parse_path(text: str) -> tuple[str, slice | None]:
    """``data.jsonl@[10:-5]`` -> (``data.jsonl``, ``slice(10, -5)``). Anything else is a path without a slice."""
    match = _SLICE.match(text)
    if match is None or "-" in match.groups()[1:]:
        return text, None
    path, start, stop = match.groups()
    return path, slice(int(start) if start else None, int(stop) if stop else None)


def read_file(path: str) -> Iterator[Row]:
    """The rows of a ``.jsonl`` or ``.parquet`` file, optionally of a slice of them (``path@[start:stop]``).

    Raises:
        DataError: no such file (also a FileNotFoundError), another format, or a line that is not a JSON object.
    """
    for _, row in numbered_rows(path):
        yield row


def check_prompt_file(flag: str, path: str) -> Iterator[str]:
    """Problems of the file that ``flag`` names, found without a tokenizer. Of large files only row one is read."""
    file = Path(parse_path(path)[0])
    if file.suffix in _SUFFIXES and not file.is_file():
        yield f"{flag} {path}: there is no such file."
        return
    try:
        rows = numbered_rows(path)
        is_small = file.stat().st_size < _CHECK_ALL_BELOW_BYTES
        count = sum(1 for _ in (rows if is_small else itertools.islice(rows, 1)))
    except (OSError, DataError, ImportError) as error:
        yield f"{flag} {path}: {error}"
    else:
        if count == 0:
            yield f"{flag} {path}: there is no row in it."


def numbered_rows(path: str, on_problem: Callable[[DataError], None] | None = None) -> Iterator[tuple[str, Row]]:
    """Rows with their place, for error messages.

    Args:
        on_problem: called with the error of each invalid line, which is then left out. None: the error is raised.
    """
    file, part = parse_path(path)
    suffix = Path(file).suffix
    if suffix not in _SUFFIXES:
        raise DataError(f"{file}: prompt files must end in {' or '.join(_SUFFIXES)}")
    if not Path(file).is_file():
        raise _MissingFile(f"there is no file {file} (--prompt-data, --eval-prompt-data)")
    rows = _jsonl_rows(file, on_problem) if suffix == ".jsonl" else _parquet_rows(file)
    if part is None:
        return rows
    if (part.start or 0) >= 0 and (part.stop or 0) >= 0:
        return itertools.islice(rows, part.start, part.stop)
    return iter(list(rows)[part])  # negative bounds need the length


def _jsonl_rows(file: str, on_problem: Callable[[DataError], None] | None) -> Iterator[tuple[str, Row]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                # Some editors write a byte order mark.
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = _row(where, line)
            except DataError as error:
                if on_problem is None:
                    raise
                on_problem(error)
            else:
                yield where, row


def _row(where: str, line: bytes) -> Row:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1} of the line") from None
    row = parse_json(where, text)
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _parquet_rows(file: str) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"{file}: reading Parquet needs pyarrow (pip install 'slime[parquet]')") from None
    try:
        table = parquet.ParquetFile(file)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: not a Parquet file: {error}") from None
    # Converting every row is slow, so it is done only if a column needs it.
    has_other_types = any(name in str(table.schema_arrow) for name in _NOT_JSON)
    number = 0
    try:
        for batch in table.iter_batches():
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield f"{file} row {number}", plain_value(row) if has_other_types else row
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: cannot be read after row {number}: {error}") from None


class Dataset:
    """Prompts of one file, in an order that depends only on the seed and the epoch.

    Attributes:
        origin_samples: prompts in file order, without those that are too long.
        samples: the same in the order of the current epoch.
        epoch_id: -1 before the first shuffle.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        num_workers: int = 0,
        skips_bad_lines: bool = False,
        special_tokens_as_text: bool = False,
    ) -> None:
        """
        Args:
            tokenizer: needed for templates and for ``max_length``.
            processor: of the checkpoint, needed with ``multimodal_keys``.
            multimodal_keys: kind of media -> row field that holds it.
            max_length: prompts with more tokens are dropped. None keeps all.
            num_workers: processes that prepare the rows. 0 does it here.
            skips_bad_lines: lines that are not JSON are left out with a warning.
            special_tokens_as_text: encode special tokens in messages as text, with ``apply_chat_template``.
            prompt_key, label_key: row fields. At their defaults, files with ``prompt`` and ``label`` work as well.

        Raises:
            DataError: a missing key, a wrong type, no row, or no row that is short enough.
        """
        maker, rows = open_prompts(
            path,
            tokenizer,
            processor=processor,
            prompt_key=prompt_key,
            multimodal_keys=multimodal_keys,
            label_key=label_key,
            tool_key=tool_key,
            metadata_key=metadata_key,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs,
            max_length=max_length,
            skips_bad_lines=skips_bad_lines,
            special_tokens_as_text=special_tokens_as_text,
        )
        prepared = list(prepare(rows(), maker, num_workers))
        self.origin_samples = _short_enough(prepared, max_length)
        if not self.origin_samples:
            raise DataError(
                f"{path}: all {len(prepared)} prompts are longer than {max_length} tokens: raise "
                "--rollout-max-prompt-len (--eval-max-prompt-len for evaluation)"
            )
        self.samples = self.origin_samples
        self.epoch_id = -1
        self.seed = seed
        self._num_drawn = 0

    def shuffle(self, new_epoch_id: int) -> None:
        """Bring the samples into the order of an epoch, whatever the order was before."""
        if new_epoch_id == self.epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = new_epoch_id

    def sample(self, num_samples: int) -> list[Any]:
        """The next prompts (``Sample.prompt``) in the order of the samples. After the last one it starts again.

        For users' data sources. Its position is not part of the saved state of a data source.
        """
        if not self.samples:
            raise DataError("there is no prompt to draw")
        begin = self._num_drawn
        self._num_drawn += num_samples
        return [self.samples[i % len(self.samples)].prompt for i in range(begin, self._num_drawn)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def open_prompts(
    path: str,
    tokenizer: Any,
    *,
    processor: Any = None,
    prompt_key: str,
    multimodal_keys: dict[str, str] | None = None,
    label_key: str | None,
    tool_key: str | None,
    metadata_key: str,
    apply_chat_template: bool,
    apply_chat_template_kwargs: dict[str, Any] | None,
    max_length: int | None = None,
    skips_bad_lines: bool = False,
    special_tokens_as_text: bool = False,
) -> tuple[PromptMaker, Callable[[], Iterator[tuple[str, Row]]]]:
    """Return the maker of a file's prompts, and a function that reads its rows from the first on.

    Raises:
        DataError: a file without rows, or invalid settings.
    """
    if multimodal_keys is not None and processor is None:
        raise DataError("--multimodal-keys: the checkpoint has no processor for media; give one of a model with vision")
    read = functools.partial(numbered_rows, path, _warn if skips_bad_lines else None)
    first = next(iter(read()), None)
    if first is None:
        raise DataError(f"{path}: there is no row in it")
    if label_key is None and _DEFAULT_LABEL_KEY in first[1]:
        label_key = _DEFAULT_LABEL_KEY
    maker = PromptMaker(
        tokenizer=tokenizer,
        prompt_key=_prompt_key(first[1], prompt_key),
        label_key=label_key,
        tool_key=tool_key,
        metadata_key=metadata_key,
        template_kwargs=dict(apply_chat_template_kwargs or {}) if apply_chat_template else None,
        measures=max_length is not None,
        multimodal_keys=multimodal_keys,
        processor=processor,
        max_length=max_length,
        special_tokens_as_text=special_tokens_as_text,
    )
    return maker, read


def _warn(problem: DataError) -> None:
    logger.warning("left out (--skip-bad-lines): %s", problem)


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples whose prompt has at most ``max_length`` tokens, in their order. Message lists are not measured."""
    if max_length is None or not origin_samples:
        return origin_samples
    if not all(isinstance(sample.prompt, str) for sample in origin_samples):
        logger.warning(_NOT_MEASURED)
        return origin_samples
    lengths = prompt_lengths(origin_samples, tokenizer, processor)
    prepared = [Prepared(sample, length) for sample, length in zip(origin_samples, lengths, strict=True)]
    return _short_enough(prepared, max_length)


def _short_enough(prepared: list[Prepared], max_length: int | None) -> list[Sample]:
    samples = [one.sample for one in prepared]
    if max_length is None:
        return samples
    if any(one.num_tokens is None for one in prepared):
        logger.warning(_NOT_MEASURED)
        return samples
    kept = [one.sample for one in prepared if (one.num_tokens or 0) <= max_length]
    if len(kept) < len(samples):
        logger.info(
            "dropped %d of %d prompts longer than %d tokens", len(samples) - len(kept), len(samples), max_length
        )
    return kept


def prompt_key_of(row: Row, key: str) -> str | None:
    """The field that holds the prompt: ``key`` (``--input-key``), or the fallback of a default one. None without."""
    return next((name for name in (key, *_FALLBACK_PROMPT_KEYS.get(key, ())) if name in row), None)


def _prompt_key(row: Row, key: str) -> str:
    """The field of a file whose first row is ``row``. A row without it is an error later."""
    found = prompt_key_of(row, key) or key
    if found != key:
        logger.info("rows have no %r: prompts are read from %r (--input-key)", key, found)
    return found


SHUFFLE_BUFFER = 10_000


def shuffled(rows: Iterator[Any], size: int, generator: random.Random) -> Iterator[Any]:
    """All of ``rows``, each drawn at random from the next ``size``."""
    buffer = list(itertools.islice(rows, size))
    for row in rows:
        index = generator.randrange(len(buffer))
        yield buffer[index]
        buffer[index] = row
    generator.shuffle(buffer)
    yield from buffer


class StreamingDataset:
    """An endless stream of prompts with a position that can be saved.

    The shuffle holds ``SHUFFLE_BUFFER`` rows, so the order of a larger file is random only locally. Its generator is
    seeded by seed and epoch, so the position is the epoch and the number of rows that left the buffer. The order
    depends neither on the number of workers nor on the number of prompts per draw.

    Attributes:
        epoch_id: current pass over the file.
        offset: rows of this pass that were drawn, or dropped for their length.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[Placed]],
        maker: PromptMaker,
        *,
        name: str,
        max_length: int | None,
        seed: int,
        shuffles: bool,
        num_workers: int = 0,
        buffer_size: int = SHUFFLE_BUFFER,
    ) -> None:
        """
        Args:
            read: opens the file: its rows from the first on.
            name: of the file, for messages.
            max_length: prompts with more tokens are dropped. None keeps all.
        """
        self._read = read
        self._maker = maker
        self._name = name
        self._max_length = max_length
        self._seed = seed
        self._shuffles = shuffles
        self._num_workers = num_workers
        self._buffer_size = buffer_size
        self._stream: Generator[Prepared] | None = None
        self._num_drawn = 0
        self._has_warned = False
        self.epoch_id = 0
        self.offset = 0

    def draw(self, count: int) -> list[Sample]:
        """The next ``count`` prompts.

        Raises:
            DataError: a row that is not a prompt, or an epoch without a prompt that is short enough.
        """
        drawn: list[Sample] = []
        while len(drawn) < count:
            if self._stream is None:
                self._stream = self._prepared()
            prepared = next(self._stream, None)
            if prepared is None:
                self._next_epoch()
                continue
            self.offset += 1
            if self._is_short(prepared):
                drawn.append(prepared.sample)
                self._num_drawn += 1
        return drawn

    def seek(self, epoch_id: int, offset: int) -> None:
        """Continue at a position. The epoch is read again up to it, without preparing the skipped rows."""
        self.close()
        self.epoch_id, self.offset = epoch_id, offset
        self._num_drawn = 1 if offset else 0  # an earlier draw has found a prompt

    def close(self) -> None:
        """End the processes that prepare rows. The next draw starts new ones."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _prepared(self) -> Generator[Prepared]:
        rows = self._read()
        if self._shuffles:
            rows = shuffled(rows, self._buffer_size, random.Random(self._seed + self.epoch_id))
        yield from prepare(itertools.islice(rows, self.offset, None), self._maker, self._num_workers)

    def _next_epoch(self) -> None:
        if self._num_drawn == 0:
            reason = "there is no row in it" if self.offset == 0 else f"all prompts exceed {self._max_length} tokens"
            raise DataError(f"{self._name}: there is no prompt to draw: {reason} (--rollout-max-prompt-len)")
        self.close()
        logger.info("%s: epoch %d ends after %d rows", self._name, self.epoch_id, self.offset)
        self.epoch_id, self.offset, self._num_drawn = self.epoch_id + 1, 0, 0

    def _is_short(self, prepared: Prepared) -> bool:
        if self._max_length is None:
            return True
        if prepared.num_tokens is None:
            if not self._has_warned:
                logger.warning("%s: prompts that are message lists are not dropped for their length", self._name)
            self._has_warned = True
            return True
        return prepared.num_tokens <= self._max_length
