"""Which engine a request goes to, if the router's choice does not do.

:class:`DirectEngines` bypasses the router, because it drops unknown fields:

    return_routed_experts   which experts were chosen (--use-rollout-routing-replay)
    return_sampling_mask    which ids a token was sampled from (--rollout-top-p, --rollout-top-k)

The router still lists the engines. Requests of one session stay on one engine, whose cache holds the earlier tokens.
New sessions rotate over the engines. Used by ``sglang_rollout``, by agents' adapters and by custom generate functions
that send their own requests (:meth:`DirectEngines.choose`).

Balance: the router chooses the engine when a request arrives. Requests that arrived together were divided by their
number, but an engine may decode more slowly than others, or have got the longer responses: requests wait in its queue
while others are idle. Here such requests are aborted and sent again (``custom_generate.until_finished``), and the
router now sends them to the other engines. They had not begun, so nothing is lost. A group may then be on several
engines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import httpx

from slime.rollout.engine_request import ABORT_TIMEOUT_S, EngineRequest, abort_at
from slime.utils.async_utils import call_in_thread
from slime.utils.errors import DeadlineExceeded, EngineError
from slime.utils.http_utils import get

logger = logging.getLogger(__name__)

# Requests reuse the router's list of engines for this time.
_LIST_AGE_S = 2.0
_LIST_TIMEOUT_S = 10.0
# The router notices a failure later than the next attempt starts, so a failed engine gets no request for this time.
_AVOIDED_S = 30.0
# The oldest sessions are forgotten, because the end of a session is not visible here.
_MOST_SESSIONS = 100_000


class DirectEngines:
    """The engines of the router at ``router_url``, and the engine of each session.

    The address may also be that of an engine, which is then the only one.
    """

    def __init__(self, router_url: str) -> None:
        self.router_url = router_url
        self._urls: list[str] = []
        self._listed = float("-inf")
        # Per event loop: a task cannot be awaited from another loop.
        self._listing: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._turn = itertools.count()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._failed: dict[str, float] = {}

    def choose(self, session_id: str | None = None) -> EngineChoice:
        """A url for ``http_utils.post`` that chooses the engine of each attempt."""
        return EngineChoice(self, session_id)

    async def next_url(self, session_id: str | None) -> str:
        """The engine of the session, else one without a recent failure.

        Raises:
            EngineError: the router does not answer, or has no engine.
        """
        urls = await self._usable()
        url = self._sessions.get(session_id or "", "")
        # An engine that disappeared or failed recently: the session moves, and its cache is lost.
        if url not in urls:
            url = urls[next(self._turn) % len(urls)]
        if session_id:
            self._sessions[session_id] = url
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return url

    def note_failure(self, url: str) -> None:
        """Note that an attempt at ``url`` failed."""
        self._failed[url] = time.monotonic()
        # The engines may have changed: the next request lists them again.
        self._listed = float("-inf")

    async def _usable(self) -> Sequence[str]:
        if time.monotonic() - self._listed > _LIST_AGE_S:
            await self._refresh()
        now = time.monotonic()
        self._failed = {url: since for url, since in self._failed.items() if now - since < _AVOIDED_S}
        usable = [url for url in self._urls if url not in self._failed]
        return usable or [min(self._urls, key=lambda url: self._failed[url])]  # the one that failed longest ago

    async def _refresh(self) -> None:
        """Ask the router once for all requests of the event loop that wait for its answer."""
        loop = asyncio.get_running_loop()
        if loop not in self._listing:
            self._listing[loop] = loop.create_task(self._list())
            self._listing[loop].add_done_callback(lambda _: self._listing.pop(loop))
        await asyncio.shield(self._listing[loop])  # the others still wait when one is cancelled

    async def _list(self) -> None:
        # The age counts from the question, because the answer may be old when it arrives.
        asked = time.monotonic()
        try:
            reply = await get(f"{self.router_url}/workers", timeout_s=_LIST_TIMEOUT_S)
        except EngineError as error:
            cause = error.__cause__
            if not isinstance(cause, httpx.HTTPStatusError) or cause.response.status_code != 404:
                raise
            self._urls = [self.router_url]  # an engine has no such route
        else:
            self._urls = _engine_urls(reply, self.router_url)
        self._listed = asked


class EngineChoice:
    """Chooses the engine of each attempt of one request.

    Attributes:
        last_url: address of the engine of the last attempt.
    """

    def __init__(self, engines: DirectEngines, session_id: str | None) -> None:
        self._engines = engines
        self._session_id = session_id
        self.last_url: str | None = None

    async def __call__(self) -> str:
        """Address for the next attempt. A second call means that the last attempt failed."""
        if self.last_url is not None:
            self._engines.note_failure(self.last_url)
        self.last_url = await self._engines.next_url(self._session_id)
        return f"{self.last_url}/generate"

    def __str__(self) -> str:
        return f"/generate of {self.last_url or 'an engine'} behind {self._engines.router_url}"


async def with_packed_experts(reply: Any) -> Any:
    """``reply``. Large routed experts in it are decoded and narrowed by a thread: requests go on meanwhile."""
    if isinstance(reply, dict) and "routed_experts" in (reply.get("meta_info") or {}):
        from slime.data import engine_meta  # imports torch

        if engine_meta.has_large_array(reply):
            await call_in_thread(engine_meta.pack_routed_experts, reply["meta_info"])
    return reply


def _engine_urls(reply: Any, router_url: str) -> list[str]:
    workers = reply.get("workers") if isinstance(reply, dict) else None
    if not isinstance(workers, list):
        raise EngineError(f"GET {router_url}/workers did not list engines: {str(reply)[:300]}")
    healthy = [worker for worker in workers if worker.get("is_healthy", True)]
    parts = [kind for kind in ("prefill", "decode") if any(w.get("worker_type") == kind for w in healthy)]
    if parts:
        raise EngineError(
            f"the router at {router_url} has {' and '.join(parts)} engines, which only work together: "
            "--use-rollout-routing-replay, --rollout-top-p and --rollout-top-k need engines that do both"
        )
    if not healthy:
        raise EngineError(f"the router at {router_url} has no healthy engine ({len(workers)} in all)")
    return [worker["url"] for worker in healthy]


_EVERY_S = 2.0
_MOST_QUESTIONS = 50  # per second, for the load of an engine: 0.7 ms of processor time each
_MOST_AT_ONCE = 64
_REPLY_PAUSE_S = 0.1  # until aborted requests have returned
_MOST_ROUNDS = 20  # of them for one engine: after two seconds its load may be another
# The router prefers the engine that has the prompt in its cache, until the loads differ by this many requests.
_LEAST_DIFFERENCE = 10
_MOST_MOVES = 3  # of one sample, as another router may send it back


class Load(NamedTuple):
    """Requests of one engine."""

    url: str
    running: int
    waiting: int

    @property
    def total(self) -> int:
        return self.running + self.waiting


async def keep_balanced(workers_url: str, requests: Collection[EngineRequest]) -> None:
    """Move waiting requests, until the task is cancelled.

    Args:
        workers_url: route of the router that lists the engines.
        requests: those under way, in the order in which they were sent. Read again in every round.
    """
    moved: Counter[str] = Counter()
    pause_s = _EVERY_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            loads = await loads_of(workers_url)
            pause_s = max(_EVERY_S, len(loads) / _MOST_QUESTIONS)
            for url, count in moves(loads):
                await _move(url, count, requests, moved)
        except (EngineError, DeadlineExceeded) as error:
            logger.debug("requests stay in their engine's queue: %s", error)


async def _move(url: str, count: int, requests: Collection[EngineRequest], moved: Counter[str]) -> None:
    """Move the newest ``count`` requests of an engine, which wait at the end of its queue."""
    movable = [one for one in requests if one.session_id and one.rids and moved[one.session_id] < _MOST_MOVES]
    for _ in range(_MOST_ROUNDS):
        if not movable or count <= 0:
            return
        # The router does not show which engine has a request. An engine ignores ids that it does not have.
        newest, movable = movable[-count:], movable[:-count]
        await asyncio.gather(*(abort_at(url, {"rid": one.rids[-1]}) for one in newest))
        await asyncio.sleep(_REPLY_PAUSE_S)
        gone = [one.session_id for one in newest if one not in requests]
        moved.update(gone)
        count -= len(gone)


def moves(loads: Collection[Load]) -> list[tuple[str, int]]:
    """The engines whose queue gives requests away, and how many: half of the difference from the least busy engine."""
    free = [load.total for load in loads if not load.waiting]
    if not free:
        return []
    wanted = {load.url: min(load.waiting, (load.total - min(free) - _LEAST_DIFFERENCE) // 2) for load in loads}
    return [(url, count) for url, count in wanted.items() if count > 0]


async def loads_of(workers_url: str) -> list[Load]:
    """The loads of the engines that answer, and both prefill and decode.

    Raises:
        EngineError, DeadlineExceeded: the router did not answer.
    """
    slots = asyncio.Semaphore(_MOST_AT_ONCE)

    async def load(url: str) -> Load | None:
        try:
            async with slots:
                ranks = (await get(f"{url}/v1/loads?include=core", timeout_s=ABORT_TIMEOUT_S))["loads"]
            return Load(url, *(sum(rank[name] for rank in ranks) for name in ("num_running_reqs", "num_waiting_reqs")))
        except (EngineError, DeadlineExceeded, KeyError, TypeError):  # it leaves, or is another server
            return None

    try:
        workers = (await get(workers_url, timeout_s=ABORT_TIMEOUT_S))["workers"]
        # With separate engines for prefill and decode, a request is on two of them.
        urls = [worker["url"] for worker in workers if worker.get("worker_type", "regular") == "regular"]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"GET {workers_url} did not list engines: {error!r}") from error
    return [found for found in await asyncio.gather(*map(load, urls)) if found is not None]
