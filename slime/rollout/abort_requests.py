"""Telling the engines to drop what they are generating. The router has no such route, so each worker is asked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

from slime.utils.errors import DeadlineExceeded, EngineError
from slime.utils.http_utils import get, post

__all__ = ["abort_requests"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_REPEAT_S = 0.1
_REQUEST_TIMEOUT_S = 5.0


async def abort_requests(
    workers_url: str, running: Collection[asyncio.Task[Any]], timeout_s: float | None = None
) -> None:
    """Abort until the tasks are done or ``timeout_s`` (two seconds) have passed; a reward does not end by this.

    Repeated, because a request may be on its way while the others are dropped. A failure is only logged: the caller
    disconnects what still runs, and engines drop requests of clients that are gone.
    """
    started = time.monotonic()
    timeout_s = _TIMEOUT_S if timeout_s is None else timeout_s
    while time.monotonic() - started < timeout_s and not all(task.done() for task in running):
        try:
            workers = (await get(workers_url, timeout_s=_REQUEST_TIMEOUT_S))["workers"]
            await asyncio.gather(*(_abort_all(worker["url"]) for worker in workers))
        except (EngineError, DeadlineExceeded, KeyError, TypeError) as error:
            logger.warning("running requests could not be aborted and are disconnected instead: %s", error)
            return
        await asyncio.wait(running, timeout=_REPEAT_S)


async def _abort_all(url: str) -> None:
    await post(f"{url}/abort_request", {"abort_all": True}, max_retries=0, timeout_s=_REQUEST_TIMEOUT_S)
