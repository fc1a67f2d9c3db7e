"""The requests that wait for the model: taken in order, in rounds, and held back while weights are loaded.

    ask()      a request waits its turn ----> round ----> answer
    update()   no new requests -> those under way are answered -> load -> requests again

Called by ``app`` on the event loop of the server. Knows neither HTTP nor the model: it is given two functions that
block, and calls them in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.backends.megatron_utils.server.requests import RoundSettings, Score, ScoreRequest, plan_round
from slime.utils.async_utils import call_in_thread
from slime.utils.deadline import Deadline
from slime.utils.errors import ConfigError, DeadlineExceeded, ProcessDied, SlimeError

__all__ = ["Busy", "ScoreQueue", "Scoring", "Unusable", "Updating"]

logger = logging.getLogger(__name__)

Scoring = Callable[[list[list[list[ScoreRequest]]]], list[list[list[Score]]]]
"""Scores a round: ranks -> micro-batches -> requests, and the same for the answers. Blocks."""


class Updating(SlimeError):
    """Weights are being loaded: ask again later."""


class Busy(SlimeError):
    """Other weights are being loaded."""


class Unusable(SlimeError):
    """An update failed half way: the weights are no model any more until another one succeeds."""


@dataclass(eq=False)
class _Waiting:
    request: ScoreRequest
    answer: asyncio.Future[Score]

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_ids)


@dataclass
class ScoreQueue:
    """See the module docstring. :meth:`work` must run as long as it is used.

    Args:
        score: scores a round.
        load: loads the weights at a path within seconds; raises ``ConfigError`` before anything has changed. Blocks.
        settings: how much a round holds.
        path: where the weights came from.
        damage: why there are no weights to score with; None while there are.
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
        """The answer. Cancelled: the request leaves the queue.

        Raises:
            Updating: weights are being loaded.
            Unusable: there are no weights to score with.
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
        """Score what waits, round by round, until cancelled. A round that fails is an error of its requests only.

        Raises:
            ProcessDied: a rank is gone, in a round or in an update; whoever waits gets this error, too.
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
            if not items.answer.done():
                items.answer.set_result(scores)

    @staticmethod
    def _fail(items: list[_Waiting], error: Exception) -> None:
        for item in items:
            if not item.answer.done():
                item.answer.set_exception(error)

    async def update(self, path: str, timeout_s: float) -> dict[str, Any]:
        """Load the weights at ``path`` once nobody is being served. Returns what the server answers.

        The same path as now is skipped; as one that is being loaded, awaited.

        Raises:
            Busy: another path is being loaded.
            DeadlineExceeded: requests under way took longer, and the old weights serve on; or the loading did, and
                there are none to serve with.
            ConfigError: there are no weights at the path; the old ones serve on.
        """
        if self._loading is not None:
            if self._loading != path or self._loaded is None:
                raise Busy(f"the weights of {self._loading} are being loaded; those of {path} must wait.")
            async with _within(Deadline(timeout_s, f"the weights of {path} to be loaded")):
                return await asyncio.shield(self._loaded) | {"coalesced": True}
        if path == self.path and self.damage is None:
            return {"ok": True, "model_path": path, "skipped": True}
        self._loading = path
        self._loaded = asyncio.ensure_future(self._update(path, timeout_s))
        return await asyncio.shield(self._loaded)  # goes on when the client has left

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
            raise  # looked at before anything changed
        except Exception as error:
            self.damage = f"loading the weights of {path} failed half way ({error}): load a checkpoint that works."
            if isinstance(error, ProcessDied):  # no checkpoint helps: the work ends
                self._death = error
                self._news.set()
            raise

    def loads(self) -> dict[str, Any]:
        """How much waits and runs, in requests and tokens."""
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
