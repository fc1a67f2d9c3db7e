"""What the log-prob server is asked and what it answers, as data; and how requests are put into passes.

Knows neither HTTP nor the model. Importable without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import DataError

__all__ = ["Round", "RoundSettings", "Score", "ScoreRequest", "TooLong", "parse_request", "plan_round"]

_MAX_DRAWS = 1024
"""For each position. A micro-batch has as many columns as its request with the most."""
_MAX_DRAWS_IN_ALL = 2**22
"""Of a request: about 100 MB of JSON."""


class TooLong(DataError):
    """A request with more tokens than ``--megatron-server-max-length``."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"input_ids has {length} tokens, --megatron-server-max-length allows {limit}.")
        self.length, self.limit = length, limit


@dataclass(frozen=True)
class ScoreRequest:
    """One sequence to score.

    Attributes:
        input_ids: at least two tokens; the log-prob of each but the first is asked for.
        sample_n: draws from the distribution at each of these positions.
        label_token_ids: ``[len - 1][k]`` ids whose log-probs are asked for as well; empty where none are.
    """

    input_ids: Sequence[int]
    sample_n: int = 0
    label_token_ids: Sequence[Sequence[int]] = ()

    @property
    def num_labels(self) -> int:
        return len(self.label_token_ids[0]) if self.label_token_ids else 0

    @property
    def num_scored(self) -> int:
        return len(self.input_ids) - 1


@dataclass(frozen=True)
class Score:
    """The answer: lists, one entry for each token but the first.

    Attributes:
        log_probs: ``[len - 1]``.
        label_token_log_probs: ``[len - 1][k]``; None where no labels were given.
        sampled_token_ids, sampled_log_probs: ``[len - 1][n]``; None where nothing was drawn.
    """

    log_probs: list[float]
    label_token_log_probs: list[list[float]] | None = None
    sampled_token_ids: list[list[int]] | None = None
    sampled_log_probs: list[list[float]] | None = None


def parse_request(body: Any, *, vocab_size: int, temperature: float, max_length: int = 0) -> ScoreRequest:
    """A request from the JSON of ``POST /generate``.

    Fields that SGLang's ``/generate`` has are ignored, so that one client can ask either: nothing is generated here.

    Args:
        temperature: of the server; a request that names another one is refused.
        max_length: most tokens; 0 for no limit.

    Raises:
        TooLong: more tokens than that.
        DataError: everything else that is wrong with it, with field, value and rule.
    """
    if not isinstance(body, Mapping):
        raise DataError("the body must be a JSON object with input_ids.")
    ids = body.get("input_ids")
    if not _are_ids(ids, vocab_size) or len(ids) < 2:
        raise DataError(f"input_ids must be a list of at least 2 token ids from 0 to {vocab_size - 1}.")
    if max_length and len(ids) > max_length:
        raise TooLong(len(ids), max_length)
    number = body.get("sample_n", 0)
    most = min(vocab_size, _MAX_DRAWS, _MAX_DRAWS_IN_ALL // (len(ids) - 1))
    if type(number) is not int or not 0 <= number <= most:
        raise DataError(
            f"sample_n {number!r} must be an integer from 0 to {most}: at most {_MAX_DRAWS} for each of the "
            f"{len(ids) - 1} tokens after the first, {_MAX_DRAWS_IN_ALL} together, and the {vocab_size} ids of the "
            "vocabulary."
        )
    labels = body.get("label_token_ids") or ()
    if labels:
        _check_labels(labels, len(ids) - 1, vocab_size)
    sampling = body.get("sampling_params") or {}
    asked = sampling.get("temperature", temperature) if isinstance(sampling, Mapping) else temperature
    if asked != temperature:
        raise DataError(
            f"sampling_params.temperature {asked} is not that of the server, which was started with "
            f"--rollout-temperature {temperature}."
        )
    return ScoreRequest(ids, number, labels)


def _check_labels(labels: Any, num_scored: int, vocab_size: int) -> None:
    if not isinstance(labels, list) or len(labels) != num_scored:
        raise DataError(f"label_token_ids must have a row for each of the {num_scored} tokens after the first.")
    if not all(_are_ids(row, vocab_size) and len(row) == len(labels[0]) for row in labels):
        raise DataError(f"every row of label_token_ids must have the same number of ids from 0 to {vocab_size - 1}.")


def _are_ids(values: Any, vocab_size: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < vocab_size for value in values)


@dataclass(frozen=True)
class RoundSettings:
    """How much goes through the model at a time.

    Attributes:
        max_tokens: of a micro-batch, together; a request above it has one of its own. 0: one request per micro-batch.
        data_parallel_size: ranks that score different requests.
        num_micro_batches: of each of them, at most; all pipeline stages work when there are more than stages.
        multiple: of which their number must be one (interleaved pipelines).
    """

    max_tokens: int
    data_parallel_size: int = 1
    num_micro_batches: int = 1
    multiple: int = 1

    @property
    def num_bins(self) -> int:
        return self.data_parallel_size * self.num_micro_batches


@dataclass(frozen=True)
class Round:
    """What goes through the model at once, every data-parallel rank with as many micro-batches as the others.

    Attributes:
        ranks: rank -> micro-batches -> positions of their requests in the queue.
        num_taken: requests at the head of the queue that are in it.
    """

    ranks: list[list[list[int]]]
    num_taken: int


def plan_round(lengths: Sequence[int], settings: RoundSettings) -> Round:
    """Take from the head of a queue what one round can hold: at least one request.

    Ranks without enough micro-batches get empty ones, in which they score a sequence that nobody asked for: experts and
    collectives of all ranks work together.

    Args:
        lengths: tokens of the waiting requests, in order; at least one.
    """
    bins: list[list[int]] = []
    sums: list[int] = []
    for index, length in enumerate(lengths):
        fits = next((number for number, used in enumerate(sums) if used + length <= settings.max_tokens), len(bins))
        if fits == settings.num_bins:
            break
        if fits == len(bins):
            bins.append([])
            sums.append(0)
        bins[fits].append(index)
        sums[fits] += length
    by_size = sorted(range(len(bins)), key=sums.__getitem__, reverse=True)
    ranks = [
        [bins[number] for number in by_size[rank :: settings.data_parallel_size]]
        for rank in range(settings.data_parallel_size)
    ]
    width = math.ceil(len(ranks[0]) / settings.multiple) * settings.multiple
    return Round([part + [[]] * (width - len(part)) for part in ranks], sum(map(len, bins)))
