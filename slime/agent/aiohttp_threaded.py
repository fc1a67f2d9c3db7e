"""An aiohttp application on a separate thread and event loop.

Used for the adapters: agents' requests are answered while the rollout's own loop does its work.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from slime.utils.errors import DeadlineExceeded, kept

__all__ = ["AppHandle", "FilteredAccessLogger", "run_app_in_thread"]

logger = logging.getLogger(__name__)

SLOW_REQUEST_S = 120.0
_STOP_TIMEOUT_S = 10.0


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs errors and slow requests. Omits HEAD requests, and requests that returned 200 within two minutes."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.method == "HEAD" or (response.status == 200 and time <= SLOW_REQUEST_S):
            return
        self.logger.info("%s %s -> %d in %.1f s", request.method, request.path, response.status, time)


@dataclass
class AppHandle:
    """A running application."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner

    def stop(self) -> None:
        """Close sockets and end the thread. A second call has no effect."""
        if self.thread.is_alive() and self.loop.is_running():
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_STOP_TIMEOUT_S)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: dict[str, Any] | None = None,
) -> AppHandle:
    """Serve ``app`` from a daemon thread. Returns when it listens.

    Args:
        host: this machine only. "0.0.0.0" for sandboxes on other machines: every machine can then connect.
        port: 0 takes a free one. The handle has the real number.
        runner_kwargs: of ``web.AppRunner``. ``{"handler_cancellation": True}`` ends the handlers of clients that left.

    Raises:
        DeadlineExceeded: it did not listen within ``start_timeout_sec`` seconds.
        Exception: the error of the start, such as OSError for a port in use.
    """
    loop = asyncio.new_event_loop()
    has_begun = threading.Event()
    failure: list[BaseException] = []
    runner = web.AppRunner(app, **({"access_log_class": FilteredAccessLogger} | (runner_kwargs or {})))

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        with kept(failure, BaseException):  # handed to the caller, who waits for it
            loop.run_until_complete(start())
        has_begun.set()
        try:
            if not failure:
                loop.run_forever()
            # On the same loop, because connections and tasks belong to it.
            loop.run_until_complete(runner.cleanup())
        finally:
            loop.close()

    thread = threading.Thread(target=serve, name=thread_name, daemon=True)
    thread.start()
    if not has_begun.wait(start_timeout_sec):
        loop.call_soon_threadsafe(loop.stop)
        raise DeadlineExceeded(f"the server {thread_name} did not listen on {host}:{port} in {start_timeout_sec} s")
    if failure:
        thread.join(_STOP_TIMEOUT_S)
        raise failure[0]
    return AppHandle(host, runner.addresses[0][1], thread, loop, runner)
