"""HTTP to engines, router and reward services: shared clients per event loop, deadlines, retries by kind.

    connection errors, 5xx   retried with exponential backoff; so are replies that were damaged on the way
    408, 429                 retried: the server wants to be asked later
    other 4xx                raised at once: the request itself is wrong
    deadline                 covers all attempts of a call; afterwards the error names the url

Attempts of ``post`` are made by this process, or by whoever :func:`set_sender` names (``--use-distributed-post``);
retries and deadline stay here either way. ``_http_client`` may be set by users' code; it is used instead of ours then.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import ssl
import threading
import weakref
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

import httpx

from slime.utils.deadline import Deadline
from slime.utils.errors import EngineError, RequestRefused
from slime.utils.host import (
    SLIME_HOST_IP_ENV,
    find_available_port,
    get_host_info,
    is_port_available,
    run_router,
    terminate_process,
)
from slime.utils.host import wrap_ipv6 as _wrap_ipv6

__all__ = [
    "SLIME_HOST_IP_ENV",
    "Reply",
    "Sender",
    "Url",
    "_wrap_ipv6",
    "close_http_client",
    "find_available_port",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
    "receive_stream",
    "run_router",
    "send",
    "set_sender",
    "terminate_process",
]

logger = logging.getLogger(__name__)

Url: TypeAlias = str | Callable[[], Awaitable[str]]
"""An address, or what gives one to each attempt; may raise :class:`EngineError`, which counts as a failed attempt."""


class Reply(NamedTuple):
    """What became of one attempt.

    Attributes:
        status: HTTP status; None: no answer came.
        content: decoded JSON of a success, or its text; of anything else a text that says what is wrong.
    """

    status: int | None
    content: Any


Sender: TypeAlias = Callable[[str, Any, dict[str, str] | None, float], Awaitable[Reply]]
"""Makes one attempt: (url, JSON value, headers, seconds) -> reply. Raises ``TimeoutError`` when the seconds passed."""

DEFAULT_TIMEOUT_S = 1800.0
_LATER = (408, 429)
_BROKEN = (httpx.TransportError, httpx.DecodingError)
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 5.0
_MAX_QUOTED_CHARS = 2000
_CONNECTIONS_PER_CLIENT = 16
_MAX_CLIENTS = 64

_http_client: httpx.AsyncClient | None = None
_sender: Sender | None = None


class _Clients:
    """The clients of every event loop (a client is bound to the loop that uses it), made on first use.

    A loop has several, used in turn: httpcore looks at all connections of a pool for each request, which with hundreds
    of them costs more than the requests themselves.
    """

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[httpx.AsyncClient]]
        self._by_loop = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._turn = itertools.count()
        self._ssl: ssl.SSLContext | None = None
        self.max_connections = 512
        self.timeout_s = DEFAULT_TIMEOUT_S

    def next(self) -> httpx.AsyncClient:
        if _http_client is not None:
            return _http_client
        loop = asyncio.get_running_loop()
        with self._lock:
            clients = self._by_loop.setdefault(loop, [])
            wanted = min(_MAX_CLIENTS, -(-self.max_connections // _CONNECTIONS_PER_CLIENT))
            if len(clients) < wanted:
                clients.append(self._new())
                return clients[-1]
            return clients[next(self._turn) % len(clients)]

    def _new(self) -> httpx.AsyncClient:
        if self._ssl is None:
            self._ssl = httpx.create_ssl_context()  # slow to make, and shareable
        return httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0),
            timeout=None,  # every call brings its own deadline
            trust_env=False,  # engines are never behind the user's proxy
            verify=self._ssl,
        )

    async def close(self) -> None:
        with self._lock:
            clients = self._by_loop.pop(asyncio.get_running_loop(), [])
        for client in clients:
            await client.aclose()


_clients = _Clients()


def get_rollout_num_engines(args: Namespace) -> int:
    """Number of inference engines: given, or derived from devices and devices per engine."""
    number: int | None = getattr(args, "rollout_num_engines", None)  # where devices do not say it
    if number is not None:
        return number
    gpus: int = args.rollout_num_gpus or 0
    return max(1, gpus // args.rollout_num_gpus_per_engine) if gpus > 0 else 0


def init_http_client(args: Namespace) -> None:
    """Take connection limit and default deadline from the command line."""
    _clients.max_connections = max(1, args.sglang_server_concurrency * get_rollout_num_engines(args))
    _clients.timeout_s = getattr(args, "rollout_request_timeout", DEFAULT_TIMEOUT_S)


async def close_http_client() -> None:
    """Close the clients of the running loop; the next call opens a new one."""
    await _clients.close()


def set_sender(sender: Sender | None) -> None:
    """From now on ``sender`` makes the attempts of :func:`post` in this process; None: the process itself."""
    global _sender
    _sender = sender


async def send(url: str, body: Any, headers: dict[str, str] | None, timeout_s: float) -> Reply:
    """One attempt, by this process. Raises ``TimeoutError``."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await _clients.next().post(url, json=body, headers=headers)
    except _BROKEN as error:
        return Reply(None, f"{type(error).__name__}: {error}")
    return Reply(response.status_code, _content(response) if response.is_success else _problem(response))


async def post(
    url: Url,
    payload: Any,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float | None = None,
) -> Any:
    """POST ``payload`` as JSON. Returns the decoded JSON of the reply, or its text where it is not JSON.

    Args:
        payload: the JSON value, or a function that makes one for each attempt (ids that must not repeat).
        max_retries: attempts after the first one where that may help; the pause between them doubles from
            0.25 s to 5 s.
        timeout_s: seconds for all attempts together. None: the value of :func:`init_http_client`.

    Raises:
        RequestRefused: 4xx but 408 and 429, at once; with url, status and reply.
        EngineError: those, 5xx and connection errors, after the last attempt.
        DeadlineExceeded: ``timeout_s`` passed.
    """
    deadline = Deadline(_clients.timeout_s if timeout_s is None else timeout_s, f"the reply of POST {url}")
    problem = ""
    for attempt in range(max_retries + 1):
        if attempt:
            await _pause(attempt, deadline)
        if deadline.remaining <= 0:
            raise deadline.error(problem)
        try:
            async with asyncio.timeout(deadline.remaining):
                address = await _address(url)
                body = payload() if callable(payload) else payload
                reply = await (_sender or send)(address, body or {}, headers, deadline.remaining)
        except _BROKEN as error:  # of the address
            problem = f"{type(error).__name__}: {error}"
            continue
        except TimeoutError:
            raise deadline.error(problem) from None
        if reply.status is not None and 200 <= reply.status < 300:
            return reply.content
        problem = str(reply.content)
        if reply.status is not None and _is_final(reply.status):
            raise RequestRefused(f"POST {url} was refused with {problem}")
    raise EngineError(f"POST {url} failed {max_retries + 1} times in {deadline.elapsed:.1f} s, last with {problem}")


async def receive_stream(
    url: Url,
    payload: Any,
    receive: Callable[[Any], bool],
    *,
    max_retries: int,
    headers: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> None:
    """POST ``payload`` and hand the JSON of every server-sent event to ``receive``, up to ``[DONE]`` or the end.

    Payload, retries and deadline are those of :func:`post`; once an event has come nothing is sent again. Events that
    are not JSON are skipped with a warning.

    Args:
        receive: returns whether to go on; the connection is closed otherwise.

    Raises:
        EngineError, DeadlineExceeded: as :func:`post`.
        ConnectionError: the stream broke off.
    """
    deadline = Deadline(_clients.timeout_s if timeout_s is None else timeout_s, f"the stream of POST {url}")
    problem, has_begun = "", False
    for attempt in range(max_retries + 1):
        if attempt:
            await _pause(attempt, deadline)
        if deadline.remaining <= 0:
            raise deadline.error(problem)
        body = payload() if callable(payload) else payload
        try:
            async with (
                asyncio.timeout(deadline.remaining),
                _opened(url, body, headers) as response,
            ):
                if not response.is_success:
                    await response.aread()
                    problem = _problem(response)
                    if _is_final(response.status_code):
                        raise RequestRefused(f"POST {url} was refused with {problem}")
                    continue
                async for event in _events(response):
                    has_begun = True
                    if not receive(event):
                        return
                return
        except _BROKEN as error:
            problem = f"{type(error).__name__}: {error}"
            if has_begun:
                raise ConnectionError(f"the stream of POST {url} broke off: {problem}") from error
        except TimeoutError:
            raise deadline.error(problem) from None
    raise EngineError(f"POST {url} failed {max_retries + 1} times in {deadline.elapsed:.1f} s, last with {problem}")


async def _address(url: Url) -> str:
    if isinstance(url, str):
        return url
    try:
        return await url()
    except EngineError as error:
        raise httpx.ConnectError(str(error)) from error  # tried again, as any connection that could not be made


@asynccontextmanager
async def _opened(url: Url, body: Any, headers: dict[str, str] | None) -> AsyncIterator[httpx.Response]:
    address = await _address(url)
    async with _clients.next().stream("POST", address, json=body or {}, headers=headers) as response:
        yield response


async def _pause(attempt: int, deadline: Deadline) -> None:
    pause = min(_FIRST_BACKOFF_S * 2 ** (attempt - 1), _LAST_BACKOFF_S) * random.uniform(0.8, 1.2)
    await asyncio.sleep(min(pause, deadline.remaining))


async def _events(response: httpx.Response) -> AsyncGenerator[Any]:
    async for line in response.aiter_lines():
        text = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not text:
            continue
        if text == "[DONE]":
            return
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            logger.warning("skipped an event of %s that is not JSON: %.200s", response.url, text)


async def get(url: str, *, timeout_s: float = 30.0) -> Any:
    """GET once and return the JSON. Raises :class:`EngineError` for anything else."""
    try:
        response = await _clients.next().get(url, timeout=timeout_s)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise EngineError(f"GET {url} failed: {type(error).__name__}: {error}") from error
    return _content(response)


def _is_final(status: int) -> bool:
    """Whether the same request would be refused again."""
    return status < 500 and status not in _LATER


def _problem(response: httpx.Response) -> str:
    return f"status {response.status_code}: {response.text[:_MAX_QUOTED_CHARS]}"


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
