"""Rows become prompts, loaded at once or as a stream, from one source or a mixture.

Called by the data source and by evaluation. Every error names file, line and key.

:class:`StreamingDataset` (``--streaming-data``):

    file --rows--> [shuffle buffer] --> prepared ahead (--num-data-workers) --> too long? --> drawn
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from slime.data.prepare import Placed, Prepared, PromptMaker, Row, prepare, prompt_lengths
from slime.data.rows import numbered_rows
from slime.data.sample import Sample
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

_FALLBACK_PROMPT_KEYS = {"input": ("prompt", "text"), "text": ("prompt", "input")}
_DEFAULT_LABEL_KEY = "label"
_NOT_MEASURED = "prompts are message lists, so none is dropped for its length; use --apply-chat-template"


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
        settings = PromptMaker(
            tokenizer,
            processor,
            max_length,
            prompt_key=prompt_key,
            multimodal_keys=multimodal_keys,
            label_key=label_key,
            tool_key=tool_key,
            metadata_key=metadata_key,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs,
            special_tokens_as_text=special_tokens_as_text,
        )
        maker, rows = open_prompts(path, settings, skips_bad_lines=skips_bad_lines)
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
    path: str, settings: PromptMaker, *, skips_bad_lines: bool = False
) -> tuple[PromptMaker, Callable[[], Iterator[Placed]]]:
    """Return ``settings`` with the keys of a file's first row, and a function that reads the rows from the first on.

    Raises:
        DataError: a file without rows, or invalid settings.
    """
    if settings.multimodal_keys is not None and settings.processor is None:
        raise DataError("--multimodal-keys: the checkpoint has no processor for media; give one of a model with vision")
    read = functools.partial(numbered_rows, path, _warn if skips_bad_lines else None)
    first = next(iter(read()), None)
    if first is None:
        raise DataError(f"{path}: there is no row in it")
    label_key = settings.label_key
    if label_key is None and _DEFAULT_LABEL_KEY in first[1]:
        label_key = _DEFAULT_LABEL_KEY
    prompt_key, is_optional = _prompt_key(first[1], settings.prompt_key), settings.label_key is None
    return replace(settings, prompt_key=prompt_key, label_key=label_key, label_is_optional=is_optional), read


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


@dataclass(eq=False)
class StreamingDataset:
    """An endless stream of prompts with a position that can be saved.

    The shuffle holds ``SHUFFLE_BUFFER`` rows, so the order of a larger file is random only locally. Its generator is
    seeded by seed and epoch, so the position is the epoch and the number of rows that left the buffer. The order
    depends neither on the number of workers nor on the number of prompts per draw.

    Attributes:
        read: opens the file: its rows from the first on.
        name: of the file, for messages.
        epoch_id: current pass over the file.
        offset: rows of this pass that were drawn, or dropped for their length.
    """

    read: Callable[[], Iterator[Placed]]
    maker: PromptMaker
    _: KW_ONLY
    name: str
    seed: int
    shuffles: bool
    num_workers: int = 0
    buffer_size: int = SHUFFLE_BUFFER

    def __post_init__(self) -> None:
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
        rows = self.read()
        if self.shuffles:
            rows = shuffled(rows, self.buffer_size, random.Random(self.seed + self.epoch_id))
        yield from prepare(itertools.islice(rows, self.offset, None), self.maker, self.num_workers)

    def _next_epoch(self) -> None:
        if self._num_drawn == 0:
            reason = (
                "there is no row in it" if self.offset == 0 else f"all prompts exceed {self.maker.max_length} tokens"
            )
            raise DataError(f"{self.name}: there is no prompt to draw: {reason} (--rollout-max-prompt-len)")
        self.close()
        logger.info("%s: epoch %d ends after %d rows", self.name, self.epoch_id, self.offset)
        self.epoch_id, self.offset, self._num_drawn = self.epoch_id + 1, 0, 0

    def _is_short(self, prepared: Prepared) -> bool:
        if self.maker.max_length is None:
            return True
        if prepared.num_tokens is None:
            if not self._has_warned:
                logger.warning("%s: prompts that are message lists are not dropped for their length", self.name)
            self._has_warned = True
            return True
        return prepared.num_tokens <= self.maker.max_length


def draw_rows(dataset: Any, epoch_id: int, offset: int, count: int, *, shuffles: bool) -> tuple[list[Sample], int, int]:
    """The next ``count`` prompts of a :class:`Dataset` from a position on, and the position after them."""
    drawn: list[Sample] = []
    while len(drawn) < count:
        if offset >= len(dataset):
            epoch_id, offset = epoch_id + 1, 0
        if shuffles:
            dataset.shuffle(epoch_id)  # cheap if it is in this order
        part = dataset.samples[offset : offset + count - len(drawn)]
        offset += len(part)
        drawn += part
    return drawn, epoch_id, offset


class LoadedStream:
    """A :class:`Dataset` with the interface of :class:`StreamingDataset`."""

    def __init__(self, dataset: Dataset, *, shuffles: bool) -> None:
        self.dataset = dataset
        self._shuffles = shuffles
        self.epoch_id = self.offset = 0

    def draw(self, count: int) -> list[Sample]:
        drawn, self.epoch_id, self.offset = draw_rows(
            self.dataset, self.epoch_id, self.offset, count, shuffles=self._shuffles
        )
        return drawn

    def seek(self, epoch_id: int, offset: int) -> None:
        self.epoch_id, self.offset = epoch_id, offset

    def __len__(self) -> int:
        return len(self.dataset)


@dataclass
class _Part:
    stream: StreamingDataset | LoadedStream
    share: float
    credit: float = 0.0


class Mixture:
    """An endless stream of prompts from several sources, each with a share of the draws.

    Each source comes in the order that it would have alone, with epochs of its size. After any number of draws each
    source was drawn as often as its share demands, up to one draw (smooth weighted round-robin: a draw gives every
    source a credit of its share, and takes 1 from the one with the largest credit). The order depends neither on the
    number of prompts per draw nor on interruptions.

    Attributes:
        epoch_id: 0. Only the sources have epochs.
        offset: prompts that were drawn.
    """

    epoch_id = 0

    def __init__(self, sources: Mapping[str, tuple[float, StreamingDataset | LoadedStream]]) -> None:
        """
        Args:
            sources: name -> weight and prompts.
        """
        total = sum(weight for weight, _ in sources.values())
        self._parts = {name: _Part(stream, weight / total) for name, (weight, stream) in sources.items()}
        self.offset = 0

    def draw(self, count: int) -> list[Sample]:
        """The next ``count`` prompts. ``metadata["source_name"]`` is the name of the source."""
        chosen = [self._next() for _ in range(count)]
        drawn = {name: iter(self._parts[name].stream.draw(chosen.count(name))) for name in dict.fromkeys(chosen)}
        self.offset += count
        return [_labeled(next(drawn[name]), name) for name in chosen]

    def _next(self) -> str:
        for part in self._parts.values():
            part.credit += part.share
        name = max(self._parts, key=lambda name: self._parts[name].credit)  # of equal ones the first
        self._parts[name].credit -= 1
        return name

    def state(self) -> dict[str, Any]:
        """Positions and credits, as JSON values."""
        return {
            name: {"epoch_id": part.stream.epoch_id, "offset": part.stream.offset, "credit": part.credit}
            for name, part in self._parts.items()
        }

    def restore(self, state: Mapping[str, Any], offset: int) -> None:
        """Continue at a state. A source that it lacks starts at its first row."""
        self.offset = offset
        for name, part in self._parts.items():
            known = state.get(name, {})
            part.stream.seek(known.get("epoch_id", 0), known.get("offset", 0))
            part.credit = known.get("credit", 0.0)

    def __len__(self) -> int:
        """Prompts of all sources. 0 if they are read during the run."""
        return sum(len(part.stream) for part in self._parts.values() if isinstance(part.stream, LoadedStream))


def _labeled(sample: Sample, name: str) -> Sample:
    sample.metadata.setdefault("source_name", name)
    return sample
