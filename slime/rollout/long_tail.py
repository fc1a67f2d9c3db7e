"""The order in which the prompts of a rollout are generated, and the time that its slowest samples cost.

A rollout ends with its longest response. If that begins last, engines wait for it. Responses to a prompt have similar
lengths from epoch to epoch, so a prompt's last responses predict its next ones.

Prompts that were drawn for an earlier rollout come first: with over-sampling, those of short responses would otherwise
be left over by every rollout.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from slime.data.sample import Sample, iter_samples

_MOST_PROMPTS = 200_000  # about 30 MB
_TAIL_SHARE = 0.05

Fetch = Callable[[int], Sequence[Any]]


class LongTail:
    """Expected lengths of prompts, and end times of samples, for the rollouts of one process.

    Args:
        most: number of prompts whose length is remembered. The oldest is forgotten.
    """

    def __init__(self, most: int = _MOST_PROMPTS) -> None:
        self._longest_first = False
        self._most = most
        self._lengths: dict[bytes, float] = {}
        self._ends: list[float] | None = None
        self._newest = -1  # largest sample index drawn so far

    def begin(self, fetch: Fetch, *, longest_first: bool) -> Fetch:
        """Begin a rollout. Returns ``fetch``, the source of its prompts, in the order to generate.

        Args:
            longest_first: by expected length (``--rollout-longest-first``). Otherwise the order stays.
        """
        self._longest_first, self._ends = longest_first, []
        return (lambda count: self._ordered(fetch(count))) if longest_first else fetch

    def note_sample(self, *, counts: bool) -> None:
        """Note that a sample is finished, if it ``counts``. Without effect outside a rollout."""
        if counts and self._ends is not None:
            self._ends.append(time.monotonic())

    def end(self, groups: Sequence[Any]) -> dict[str, float]:
        """End the rollout with these finished groups. Returns its metrics."""
        if self._longest_first:
            self._remember(groups)
        ends, self._ends = self._ends, None
        return {"perf/tail_time": tail_time(ends)} if ends else {}

    def _ordered(self, groups: Sequence[Any]) -> list[Any]:
        # A prompt without history counts as the mean. Without any history, the order is that of the data source.
        mean = sum(self._lengths.values()) / max(1, len(self._lengths))
        newest = self._newest

        def place(group: Any) -> float:
            sample = next(iter_samples(group))
            if isinstance(sample.index, int):
                self._newest = max(self._newest, sample.index)
                if sample.index <= newest:
                    return -math.inf
            return -self._lengths.get(_key(sample), mean)

        return sorted(groups, key=place)

    def _remember(self, groups: Sequence[Any]) -> None:
        for group in groups:
            samples = list(iter_samples(group))
            key = _key(samples[0])
            self._lengths.pop(key, None)  # the newest are at the end
            self._lengths[key] = sum(sample.response_length for sample in samples) / len(samples)
        while len(self._lengths) > self._most:
            del self._lengths[next(iter(self._lengths))]


def _key(sample: Sample) -> bytes:
    text = sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, default=str, sort_keys=True)
    return blake2b(text.encode(), digest_size=8).digest()


def tail_time(ends: Sequence[float]) -> float:
    """Seconds between the end of the first 95 % of the samples and that of the last one.

    Args:
        ends: time at which each sample was finished.
    """
    times = sorted(ends)
    return times[-1] - times[math.ceil((1 - _TAIL_SHARE) * len(times)) - 1]
