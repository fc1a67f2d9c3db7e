"""Requests leave the queue of an engine that lags, for engines that have room.

The router chooses the engine when a request arrives. Requests that arrived together were divided by their number, but
an engine may decode more slowly than others, or have got the longer responses: requests wait in its queue while others
are idle. Here such requests are aborted and sent again (``custom_generate.until_finished``), and the router now sends
them to the other engines. They had not begun, so nothing is lost. A group may then be on several engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from slime.rollout.engine_request import ABORT_TIMEOUT_S, EngineRequest, abort_at
from slime.utils.errors import DeadlineExceeded, EngineError
from slime.utils.http_utils import get

logger = logging.getLogger(__name__)

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
