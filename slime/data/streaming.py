"""Prompts of a file that is read while they are drawn (``--streaming-data``), epoch after epoch.

    file --rows--> [shuffle buffer] --> prepared ahead (--num-data-workers) --> too long? --> drawn

A shuffle holds ``SHUFFLE_BUFFER`` rows: of a larger file, a row is drawn at the earliest that many rows before its
turn, so that the order is random only locally. Its generator is seeded by seed and epoch, hence a position is the epoch
and the number of rows that left the buffer: :meth:`StreamingDataset.seek` reads the epoch again up to there, without
preparing the rows it skips. The order depends neither on the number of workers nor on how many prompts are drawn at a
time.

Called by the data source. Knows no rollout.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

from slime.data.prepare import Placed, Prepared, PromptMaker, prepare
from slime.data.sample import Sample
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

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
            DataError: a row that is no prompt; an epoch without a prompt that is short enough.
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
        """Continue as after the draws that led to this position."""
        self.close()
        self.epoch_id, self.offset = epoch_id, offset
        self._num_drawn = 1 if offset else 0  # whoever got there has found a prompt

    def close(self) -> None:
        """End the processes that prepare; the next draw starts them anew."""
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
