"""Prompt files: JSONL and Parquet rows become prompts.

Called by the data source and by evaluation. Every error says which file, which line and which key. Knows no rollout.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.data.chat import render_chat
from slime.data.sample import Sample
from slime.utils.errors import DataError

__all__ = ["Dataset", "check_prompt_file", "filter_long_prompt", "parse_path", "read_file"]

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_SLICE = re.compile(r"^(.*)@\[(-?\d*):(-?\d*)\]$", re.DOTALL)
_SUFFIXES = (".jsonl", ".parquet")
_FALLBACK_PROMPT_KEYS = {"input": ("prompt", "text"), "text": ("prompt", "input")}
_DEFAULT_LABEL_KEY = "label"
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
        DataError: no such file (also a FileNotFoundError), another format, a line that is no JSON object.
    """
    for _, row in _numbered_rows(path):
        yield row


def check_prompt_file(flag: str, path: str) -> Iterator[str]:
    """Problems of the file that ``flag`` names, found without a tokenizer. Of large files only row one is read."""
    file = Path(parse_path(path)[0])
    if file.suffix in _SUFFIXES and not file.is_file():
        yield f"{flag} {path}: there is no such file."
        return
    try:
        rows = _numbered_rows(path)
        is_small = file.stat().st_size < _CHECK_ALL_BELOW_BYTES
        count = sum(1 for _ in (rows if is_small else itertools.islice(rows, 1)))
    except OSError as error:
        yield f"{flag} {path}: {error}"
    except (DataError, ImportError) as error:
        yield f"{flag} {path}: {error}"
    else:
        if count == 0:
            yield f"{flag} {path}: there is no row in it."


def _numbered_rows(path: str) -> Iterator[tuple[str, Row]]:
    """Rows with the place they stand at, for error messages."""
    file, part = parse_path(path)
    suffix = Path(file).suffix
    if suffix not in _SUFFIXES:
        raise DataError(f"{file}: prompt files must end in {' or '.join(_SUFFIXES)}")
    if not Path(file).is_file():
        raise _MissingFile(f"there is no file {file} (--prompt-data, --eval-prompt-data)")
    rows = _jsonl_rows(file) if suffix == ".jsonl" else _parquet_rows(file)
    if part is None:
        return rows
    if (part.start or 0) >= 0 and (part.stop or 0) >= 0:
        return itertools.islice(rows, part.start, part.stop)
    return iter(list(rows)[part])  # negative bounds need the length


def _jsonl_rows(file: str) -> Iterator[tuple[str, Row]]:
    with open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
            yield where, row


def _parquet_rows(file: str) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ImportError(f"{file}: reading Parquet needs pyarrow (pip install 'slime[parquet]')") from None
    try:
        table = parquet.ParquetFile(file)
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{file}: not a Parquet file: {error}") from None
    number = itertools.count(1)
    for batch in table.iter_batches():
        for row in batch.to_pylist():
            yield f"{file} row {next(number)}", row


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
    ) -> None:
        """
        Args:
            tokenizer: needed for templates and for ``max_length``.
            processor: accepted for the sake of the signature; images are not supported yet.
            max_length: prompts with more tokens are dropped. None keeps all.
            prompt_key, label_key: row fields. At their defaults, files with ``prompt`` and ``label`` work as well.

        Raises:
            DataError: a missing key, a wrong type, no row, or no row that is short enough.
        """
        if multimodal_keys is not None:
            raise DataError("--multimodal-keys: prompts with images, video or audio are not supported yet")
        self._tokenizer = tokenizer
        self._template_kwargs = dict(apply_chat_template_kwargs or {}) if apply_chat_template else None
        rows = list(_numbered_rows(path))
        if not rows:
            raise DataError(f"{path}: there is no row in it")
        prompt_key = _prompt_key(rows[0][1], prompt_key)
        if label_key is None and _DEFAULT_LABEL_KEY in rows[0][1]:
            label_key = _DEFAULT_LABEL_KEY
        samples = [self._sample(where, row, prompt_key, label_key, tool_key, metadata_key) for where, row in rows]
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        if not self.origin_samples:
            raise DataError(
                f"{path}: all {len(samples)} prompts are longer than {max_length} tokens: raise "
                "--rollout-max-prompt-len (--eval-max-prompt-len for evaluation)"
            )
        self.samples = self.origin_samples
        self.epoch_id = -1
        self.seed = seed

    def _sample(
        self, where: str, row: Row, prompt_key: str, label_key: str | None, tool_key: str | None, metadata_key: str
    ) -> Sample:
        metadata = _metadata(where, row, metadata_key)
        tools = _tools(where, row, tool_key)
        if tools is not None:
            metadata["tools"] = tools
        prompt = _field(where, row, prompt_key, "--input-key")
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
            messages = prompt
        else:
            raise DataError(f"{where}: {prompt_key!r} must be text or a list of messages, not {type(prompt).__name__}")
        if self._template_kwargs is not None:
            kwargs = {"add_generation_prompt": True} | self._template_kwargs
            try:
                prompt = render_chat(self._tokenizer, messages, tools=tools, **kwargs)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        label = None if label_key is None else _field(where, row, label_key, "--label-key")
        return Sample(prompt=prompt, label=label, metadata=metadata)

    def shuffle(self, new_epoch_id: int) -> None:
        """Bring the samples into the order of an epoch, whatever the order was before."""
        if new_epoch_id == self.epoch_id:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self.epoch_id = new_epoch_id

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples whose prompt has at most ``max_length`` tokens, in their order. Message lists are not measured."""
    if max_length is None or not origin_samples:
        return origin_samples
    if not all(isinstance(sample.prompt, str) for sample in origin_samples):
        logger.warning("prompts are message lists, so none is dropped for its length; use --apply-chat-template")
        return origin_samples
    ids: Sequence[Sequence[int]] = tokenizer([s.prompt for s in origin_samples], add_special_tokens=False)["input_ids"]
    kept = [sample for sample, row in zip(origin_samples, ids, strict=True) if len(row) <= max_length]
    if len(kept) < len(origin_samples):
        dropped = len(origin_samples) - len(kept)
        logger.info("dropped %d of %d prompts longer than %d tokens", dropped, len(origin_samples), max_length)
    return kept


def _prompt_key(row: Row, key: str) -> str:
    candidates: tuple[str, ...] = (key, *_FALLBACK_PROMPT_KEYS.get(key, ()))
    for candidate in candidates:
        if candidate in row:
            if candidate != key:
                logger.info("rows have no %r: prompts are read from %r (--input-key)", key, candidate)
            return candidate
    return key


def _field(where: str, row: Row, key: str, flag: str) -> Any:
    if key not in row or (flag == "--input-key" and row[key] is None):
        raise DataError(f"{where}: there is no {key!r} ({flag}) in this row; its keys are {_listed(row)}")
    return row[key]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "(none)"


def _metadata(where: str, row: Row, key: str) -> dict[str, Any]:
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: {key!r} (--metadata-key) looks like JSON but is not: {error}") from None
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{where}: {key!r} (--metadata-key) must be an object, not {type(value).__name__}")
    return dict(value)


def _tools(where: str, row: Row, key: str | None) -> list[Any] | None:
    value = None if key is None else row.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: {key!r} (--tool-key) is not valid JSON: {error}") from None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list):
        raise DataError(f"{where}: {key!r} (--tool-key) must be a list of tools, not {type(value).__name__}")
    return value
