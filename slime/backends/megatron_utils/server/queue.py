"""Requests and answers of the log-prob server as data, and the queue that scores them in rounds.

    ask()      request waits ----> round ----> answer
    update()   refuse new requests -> answer those in flight -> load weights -> accept requests

``megatron_server`` calls the queue on the server's event loop. The queue imports neither torch, HTTP nor the model: it
calls two blocking functions in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from slime.utils.async_utils import Deadline, call_in_thread
from slime.utils.errors import ConfigError, DataError, DeadlineExceeded, ProcessDied, SlimeError

logger = logging.getLogger(__name__)

# For each position. A micro-batch has as many columns as its request with the most.
_MAX_DRAWS = 1024
# Of a request: about 100 MB of JSON.
_MAX_DRAWS_IN_ALL = 2**22


class TooLong(DataError):
    """A request with more tokens than ``--megatron-server-max-length``."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"input_ids has {length} tokens, --megatron-server-max-length allows {limit}.")
        self.length, self.limit = length, limit


@dataclass(frozen=True)
class ScoreRequest:
    """One sequence to score.

    Attributes:
        input_ids: at least two tokens. The log-prob of each token but the first is computed.
        sample_n: draws from the distribution at each of these positions.
        label_token_ids: ``[len - 1][k]`` ids whose log-probs are computed too. Empty if none.
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
        label_token_log_probs: ``[len - 1][k]``, None without labels.
        sampled_token_ids, sampled_log_probs: ``[len - 1][n]``, None without draws.
    """

    log_probs: list[float]
    label_token_log_probs: list[list[float]] | None = None
    sampled_token_ids: list[list[int]] | None = None
    sampled_log_probs: list[list[float]] | None = None


def parse_request(body: Any, *, vocab_size: int, temperature: float, max_length: int = 0) -> ScoreRequest:
    """A request from the JSON of ``POST /generate``.

    Fields that SGLang's ``/generate`` has are ignored, so that one client can ask either: nothing is generated here.

    Args:
        temperature: of the server. A request with another one is refused.
        max_length: largest number of tokens, 0 for no limit.

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
    if type(number) is not int or not 0 <= number <= most:  # isinstance would accept true
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


def _are_ids(values: Any, vocab_size: int) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < vocab_size for value in values)


@dataclass(frozen=True)
class RoundSettings:
    """Limits of a round.

    Attributes:
        max_tokens: total of a micro-batch. A larger request is a micro-batch alone. 0: one request per micro-batch.
        data_parallel_size: ranks that score different requests.
        num_micro_batches: at most, per rank. All pipeline stages work if there are more than stages.
        multiple: their number is a multiple of this (interleaved pipelines).
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
    """The requests that are scored at once. Every data-parallel rank has as many micro-batches as the others.

    Attributes:
        ranks: rank -> micro-batches -> positions of their requests in the queue.
        num_taken: requests at the head of the queue that are in it.
    """

    ranks: list[list[list[int]]]
    num_taken: int


def plan_round(lengths: Sequence[int], settings: RoundSettings) -> Round:
    """Take the requests of one round from the head of a queue: at least one.

    Args:
        lengths: tokens of the waiting requests, in order. At least one request.
    """
    bins: list[list[int]] = []
    sums: list[int] = []
    for index, length in enumerate(lengths):
        fits = next((number for number, used in enumerate(sums) if used + length <= settings.max_tokens), len(bins))
        if fits == settings.num_bins:  # no request overtakes one that waits longer
            break
        if fits == len(bins):
            bins.append([])
            sums.append(0)
        bins[fits].append(index)
        sums[fits] += length
    # Largest first, so that the sums of the ranks are similar.
    by_size = sorted(range(len(bins)), key=sums.__getitem__, reverse=True)
    ranks = [
        [bins[number] for number in by_size[rank :: settings.data_parallel_size]]
        for rank in range(settings.data_parallel_size)
    ]
    width = math.ceil(len(ranks[0]) / settings.multiple) * settings.multiple
    # All ranks run the same number of collectives: in an empty micro-batch a rank scores a dummy sequence.
    return Round([part + [[]] * (width - len(part)) for part in ranks], sum(map(len, bins)))


Scoring = Callable[[list[list[list[ScoreRequest]]]], list[list[list[Score]]]]
"""Scores a round: ranks -> micro-batches -> requests, and the same for the answers. Blocks."""


class Updating(SlimeError):
    """Weights are being loaded: ask again later."""


class Busy(SlimeError):
    """Other weights are being loaded."""


class Unusable(SlimeError):
    """An update failed half way: the weights are unusable until another update succeeds."""


@dataclass(eq=False)
class _Waiting:
    request: ScoreRequest
    answer: asyncio.Future[Score]

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_ids)


@dataclass
class ScoreQueue:
    """The queue of the module docstring. :meth:`work` must run as long as it is used.

    Args:
        score: scores a round.
        load: loads the weights at a path within seconds. Raises ``ConfigError`` before it changes anything. Blocks.
        settings: how much a round holds.
        path: source of the weights.
        damage: the reason why the weights are unusable, or None.
    """

    score: Scoring
    load: Callable[[str, float], None]
    settings: RoundSettings
    path: str
    damage: str | None = None
    _waiting: list[_Waiting] = field(default_factory=list)
    _running: list[list[_Waiting]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _loading: str | None = None
    _loaded: asyncio.Future[dict[str, Any]] | None = None
    _death: ProcessDied | None = None
    _num_finished: int = 0
    _num_finished_tokens: int = 0

    async def ask(self, request: ScoreRequest) -> Score:
        """The answer. If the call is cancelled, the request leaves the queue.

        Raises:
            Updating: weights are being loaded.
            Unusable: the weights are unusable.
        """
        if self._loading is not None:
            raise Updating(f"the weights of {self._loading} are being loaded; ask again later.")
        if self.damage is not None:
            raise Unusable(self.damage)
        item = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._idle.clear()
        self._news.set()
        return await item.answer

    async def work(self) -> None:
        """Score the waiting requests, round by round, until cancelled. A failed round is an error of its requests only.

        Raises:
            ProcessDied: a rank is gone, in a round or in an update. All waiting requests get this error too.
        """
        while True:
            self._waiting = [item for item in self._waiting if not item.answer.done()]
            if not self._waiting:
                self._idle.set()
                self._news.clear()
                if self._death is not None:
                    raise self._death
                await self._news.wait()
                continue
            plan = plan_round([item.num_tokens for item in self._waiting], self.settings)
            taken, self._waiting = self._waiting[: plan.num_taken], self._waiting[plan.num_taken :]
            self._running = [[taken[i] for part in rank for i in part] for rank in plan.ranks]
            try:
                await self._score([[[taken[i] for i in part] for part in rank] for rank in plan.ranks])
            except ProcessDied as death:
                self._fail([*taken, *self._waiting], death)
                raise
            except Exception as error:
                logger.exception("a round of %d requests failed", len(taken))
                self._fail(taken, error)
            finally:
                self._running = []

    async def _score(self, ranks: list[list[list[_Waiting]]]) -> None:
        asked = [[[item.request for item in part] for part in rank] for rank in ranks]
        answers = await call_in_thread(self.score, asked)
        for items, scores in zip(_flat(ranks), _flat(answers), strict=True):
            self._num_finished += 1
            self._num_finished_tokens += items.num_tokens
            if not items.answer.done():  # done: the client has disconnected
                items.answer.set_result(scores)

    @staticmethod
    def _fail(items: list[_Waiting], error: Exception) -> None:
        for item in items:
            if not item.answer.done():
                item.answer.set_exception(error)

    async def update(self, path: str, timeout_s: float) -> dict[str, Any]:
        """Load the weights at ``path`` once no request is running. Returns the server's reply.

        If ``path`` is loaded already, return at once. If it is being loaded, wait for that.

        Raises:
            Busy: another path is being loaded.
            DeadlineExceeded: running requests took longer, and the old weights stay in use. Or the loading did, and
                the weights are unusable.
            ConfigError: the path has no weights. The old ones stay in use.
        """
        if self._loading is not None:
            if self._loading != path or self._loaded is None:
                raise Busy(f"the weights of {self._loading} are being loaded; those of {path} must wait.")
            async with _within(Deadline(timeout_s, f"the weights of {path} to be loaded")):
                return await asyncio.shield(self._loaded) | {"coalesced": True}
        if path == self.path and self.damage is None:
            return {"ok": True, "model_path": path, "skipped": True}
        self._loading = path  # before any await: new requests are refused from here on
        self._loaded = asyncio.ensure_future(self._update(path, timeout_s))
        return await asyncio.shield(self._loaded)  # continues if the client disconnects

    async def _update(self, path: str, timeout_s: float) -> dict[str, Any]:
        try:
            before = self.loads()
            deadline = Deadline(timeout_s, f"{before['inflight_size']} requests to be answered before an update")
            async with _within(deadline):
                await self._idle.wait()
            with self._damaging(path):
                await call_in_thread(self.load, path, deadline.remaining)
            self.path, self.damage = path, None
            return {
                "ok": True,
                "model_path": path,
                "before_loads": before,
                "after_loads": self.loads(),
                "update_result": "loaded",
            }
        finally:
            self._loading = self._loaded = None

    @contextmanager
    def _damaging(self, path: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise  # raised before anything changed
        except Exception as error:
            self.damage = f"loading the weights of {path} failed half way ({error}): load a checkpoint that works."
            if isinstance(error, ProcessDied):  # no checkpoint helps: ``work`` ends
                self._death = error
                self._news.set()
            raise

    def loads(self) -> dict[str, Any]:
        """Counts of waiting and running requests and tokens."""
        waiting = [item for item in self._waiting if not item.answer.done()]
        running = [sum(item.num_tokens for item in items) for items in self._running]
        return {
            "queue_size": len(waiting),
            "inflight_size": len(waiting) + sum(map(len, self._running)),
            "total_finished_reqs": self._num_finished,
            "total_finished_tokens": self._num_finished_tokens,
            "pending_tokens": sum(item.num_tokens for item in waiting),
            "pending_response_tokens": sum(item.request.num_scored for item in waiting),
            "running_tokens": sum(running),
            "running_by_worker": running,
        }


def _flat(ranks: list[list[list[Any]]]) -> Iterator[Any]:
    return (item for rank in ranks for part in rank for item in part)


@asynccontextmanager
async def _within(deadline: Deadline) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline.remaining):
            yield
    except TimeoutError as error:
        raise error if isinstance(error, DeadlineExceeded) else deadline.error() from None
