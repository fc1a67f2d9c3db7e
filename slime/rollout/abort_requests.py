"""Ending what a rollout left running: engines drop their requests, tasks return or are cancelled; and what is noted on
responses that the next rollout continues.

The router has no route for it, so each worker is asked. Nothing here raises: it also runs after an engine died.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

from slime.data.sample import Sample, SampleGroup, iter_samples
from slime.rollout.engine_request import EngineRequest
from slime.utils.errors import DeadlineExceeded, EngineError
from slime.utils.http_utils import get, post

__all__ = ["end_tasks", "gather", "mask_older_tokens", "note_start"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0
_REPEAT_S = 0.1
_REQUEST_TIMEOUT_S = 5.0
_CANCEL_TIMEOUT_S = 10.0
_MOST_AT_ONCE = 64


async def end_tasks(
    tasks: Collection[asyncio.Task[SampleGroup]],
    workers_url: str,
    patience_s: float | None = None,
    *,
    requests: Collection[EngineRequest] | None = None,
) -> list[SampleGroup]:
    """Abort requests until the tasks are done or ``patience_s`` (two seconds) have passed, then cancel the others.

    Args:
        requests: those to abort, as they are at that time; None: all that the engines have.

    Returns:
        The groups of the tasks that were running and returned.
    """
    running = {task for task in tasks if not task.done()}
    if running:
        await _abort_requests(workers_url, running, _PATIENCE_S if patience_s is None else patience_s, requests)
    returned = [task for task in running if task.done() and not task.cancelled()]
    if running:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_TIMEOUT_S)
        logger.info("ended %d groups that were still running", len(running))
    # One error is raised by the rollout itself; asyncio would report the others as never retrieved.
    failed = {task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None}
    return [task.result() for task in returned if task not in failed]


async def gather(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Results in order; the first failure cancels the others."""
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def note_start(groups: list[SampleGroup], rollout_id: int) -> None:
    """Remember in which rollout a response was begun."""
    for sample in iter_samples(groups):
        if sample.response_length > 0:
            sample.metadata.setdefault("start_rollout_id", rollout_id)


def mask_older_tokens(sample: Sample | list[Sample]) -> None:
    """Tokens from earlier rollouts came from older weights: they stay in the context but are not trained on."""
    for item in iter_samples(sample):
        if item.response_length > 0:
            item.loss_mask = [0] * item.response_length


async def _abort_requests(
    workers_url: str,
    running: Collection[asyncio.Task[Any]],
    patience_s: float,
    requests: Collection[EngineRequest] | None,
) -> None:
    """Repeated, because a request may be on its way while the others are dropped. A failure is only logged: the caller
    disconnects what still runs, and engines drop requests of clients that are gone.
    """
    started = time.monotonic()
    places = asyncio.Semaphore(_MOST_AT_ONCE)
    told: set[str] = set()
    while time.monotonic() - started < patience_s and not all(task.done() for task in running):
        try:
            workers = (await get(workers_url, timeout_s=_REQUEST_TIMEOUT_S))["workers"]
            bodies = [{"abort_all": True}] if requests is None else [{"rid": rid} for rid in _rids(requests, told)]
            await asyncio.gather(*(_abort(worker["url"], body, places) for worker in workers for body in bodies))
        except (EngineError, DeadlineExceeded, KeyError, TypeError) as error:
            logger.warning("running requests could not be aborted and are disconnected instead: %s", error)
            return
        await asyncio.wait(running, timeout=_REPEAT_S)


def _rids(requests: Collection[EngineRequest], told: set[str]) -> list[str]:
    """Ids to abort now: those of attempts that got lost once, the last one of each request again and again."""
    rids = [rid for request in requests for rid in request.rids if rid not in told or rid == request.rids[-1]]
    told.update(rids)
    return rids


async def _abort(url: str, body: dict[str, Any], places: asyncio.Semaphore) -> None:
    async with places:
        await post(f"{url}/abort_request", body, max_retries=0, timeout_s=_REQUEST_TIMEOUT_S)
