"""A web server in a thread of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serving(app: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the address of ``app``, and the function that stops it before the end."""
    web = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=web.run)
    thread.start()
    while not web.started:
        time.sleep(0.05)
    port = web.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        web.should_exit = True
        thread.join()

    try:
        yield f"http://127.0.0.1:{port}", stop
    finally:
        stop()
