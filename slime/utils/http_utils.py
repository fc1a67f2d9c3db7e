"""HTTP requests to engines, router and reward services: shared clients per event loop, deadlines, retries by kind.

    connection errors, 5xx   retried with exponential backoff, as are damaged replies
    408, 429                 retried
    other 4xx                raised at once
    deadline                 covers all attempts of a call, and its error names the url
    silent host              found by TCP keepalive: a request without a deadline does not wait for ever

Attempts of ``post`` are made by this process, or by the sender that :func:`set_sender` names
(``--use-distributed-post``). Retries and the deadline stay in this module in both cases. If a user's code sets
``_http_client``, every request uses that client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import random
import socket
import ssl
import threading
import weakref
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import httpx

from slime.utils.async_utils import Deadline
from slime.utils.errors import EngineError, RequestExpired, RequestRefused
from slime.utils.net import (
    SLIME_HOST_IP_ENV,
    find_available_port,
    get_host_info,
    is_port_available,
    run_router,
    terminate_process,
)
from slime.utils.net import url_host as _wrap_ipv6

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
    "time_limit",
]

logger = logging.getLogger(__name__)

# An address, or a function that returns one for each attempt. Its EngineError counts as a failed attempt.
Url: TypeAlias = str | Callable[[], Awaitable[str]]


class Reply(NamedTuple):
    """The outcome of one attempt.

    Attributes:
        status: HTTP status, or None without an answer.
        content: decoded JSON (or the text) of a success, else a description of the problem.
    """

    status: int | None
    content: Any


# Makes one attempt: (url, JSON value, headers, seconds) -> reply. Raises TimeoutError after these seconds. They may be
# infinite.
Sender: TypeAlias = Callable[[str, Any, dict[str, str] | None, float], Awaitable[Reply]]

DEFAULT_TIMEOUT_S = 1800.0  # of processes that have read no command line
# Request Timeout, Too Many Requests: the server asks for a later attempt.
_LATER = (408, 429)
# DecodingError: a damaged body (bad gzip) is as temporary as a broken connection.
_BROKEN = (httpx.TransportError, httpx.DecodingError)
_GET_TIMEOUT_S = 30.0
_FIRST_BACKOFF_S = 0.25
_LAST_BACKOFF_S = 5.0
_MAX_QUOTED_CHARS = 2000
_CONNECTIONS_PER_CLIENT = 16
_MAX_CLIENTS = 64
# A host that vanishes sends nothing: after a minute of silence the kernel asks six times, then the connection fails.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
]
_LIMIT_FIX = (
    "--rollout-request-timeout sets this limit. A sample over it is left out, and training without the long answers "
    "prefers short ones: leave the flag out, or raise it"
)

_http_client: httpx.AsyncClient | None = None
_sender: Sender | None = None


class _Clients:
    """The clients of each event loop, made on first use. A client is bound to the loop that uses it."""

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[httpx.AsyncClient]]
        self._by_loop = weakref.WeakKeyDictionary()  # an ended loop must not keep its connections alive
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
            # Several clients per loop: httpcore looks at all connections of a pool for each request. With hundreds of
            # connections this costs more than the requests.
            wanted = min(_MAX_CLIENTS, -(-self.max_connections // _CONNECTIONS_PER_CLIENT))
            if len(clients) < wanted:
                clients.append(self._new())
                return clients[-1]
            return clients[next(self._turn) % len(clients)]

    def _new(self) -> httpx.AsyncClient:
        if self._ssl is None:
            self._ssl = httpx.create_ssl_context()  # slow to make, and shareable
        transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0),
            trust_env=False,  # engines are inside the cluster: the user's proxy cannot reach them
            verify=self._ssl,
            socket_options=_KEEPALIVE,
        )
        # timeout: every call brings its own deadline
        return httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)

    async def close(self) -> None:
        with self._lock:
            clients = self._by_loop.pop(asyncio.get_running_loop(), [])
        for client in clients:
            await client.aclose()


_clients = _Clients()


def get_rollout_num_engines(args: Namespace) -> int:
    """The number of inference engines: given, or derived from the devices and the devices per engine."""
    # set if no device count implies it (external engines)
    number: int | None = getattr(args, "rollout_num_engines", None)
    if number is not None:
        return number
    gpus: int = args.rollout_num_gpus or 0
    return max(1, gpus // args.rollout_num_gpus_per_engine) if gpus > 0 else 0


def init_http_client(args: Namespace) -> None:
    """Set the connection limit and the default deadline from the command line."""
    _clients.max_connections = max(1, args.sglang_server_concurrency * get_rollout_num_engines(args))
    limit_s: float | None = getattr(args, "rollout_request_timeout", DEFAULT_TIMEOUT_S)
    _clients.timeout_s = math.inf if limit_s is None else limit_s


async def close_http_client() -> None:
    """Close the clients of the running loop. The next call opens a new one."""
    await _clients.close()


def set_sender(sender: Sender | None) -> None:
    """Let ``sender`` make the attempts of :func:`post` in this process. None: the process makes them itself."""
    global _sender
    _sender = sender


def time_limit(seconds: float) -> asyncio.Timeout:
    """``asyncio.timeout``, also for infinite seconds."""
    return asyncio.timeout(None if math.isinf(seconds) else seconds)


async def send(url: str, body: Any, headers: dict[str, str] | None, timeout_s: float) -> Reply:
    """Make one attempt in this process. Raises ``TimeoutError``."""
    try:
        async with time_limit(timeout_s):
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
    """POST ``payload`` as JSON. Returns the decoded JSON of the reply, or its text if it is not JSON.

    Args:
        payload: the JSON value, or a function that makes one for each attempt (for ids that must not repeat).
        max_retries: attempts after the first one, for failures that another attempt may cure. The pause between
            attempts doubles from 0.25 s to 5 s.
        timeout_s: seconds for all attempts together. None: the value of :func:`init_http_client`.

    Raises:
        RequestRefused: at once after a 4xx other than 408 and 429, with url, status and reply.
        EngineError: the last attempt failed with one of those, a 5xx, or a connection error.
        RequestExpired: ``timeout_s`` passed.
    """

    async def attempt(address: str, seconds: float) -> Reply:
        return await (_sender or send)(address, _body(payload), headers, seconds)

    return await _with_retries(attempt, url, "reply", max_retries, timeout_s)


async def receive_stream(
    url: Url,
    payload: Any,
    receive: Callable[[Any], bool],
    *,
    max_retries: int,
    headers: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> None:
    """POST ``payload`` and pass the JSON of every server-sent event to ``receive``, up to ``[DONE]`` or the end.

    Payload, retries and deadline are those of :func:`post`. After the first event nothing is sent again. Events that
    are not JSON are skipped with a warning.

    Args:
        receive: returns whether to continue. If not, the connection is closed.

    Raises:
        EngineError, RequestExpired: as :func:`post`.
        ConnectionError: the stream broke off.
    """

    async def attempt(address: str, _: float) -> Reply:
        has_begun = False
        try:
            async with _clients.next().stream("POST", address, json=_body(payload), headers=headers) as response:
                if not response.is_success:
                    await response.aread()
                    return Reply(response.status_code, _problem(response))
                async for event in _events(response):
                    has_begun = True
                    if not receive(event):
                        break  # leaving the block closes the connection, which aborts the request
        except _BROKEN as error:
            if has_begun:  # not retried: the receiver would get the first events twice
                problem = f"{type(error).__name__}: {error}"
                raise ConnectionError(f"the stream of POST {url} broke off: {problem}") from error
            raise
        return Reply(200, None)

    await _with_retries(attempt, url, "stream", max_retries, timeout_s)


async def _with_retries(
    attempt: Callable[[str, float], Awaitable[Reply]], url: Url, what: str, max_retries: int, timeout_s: float | None
) -> Any:
    """The content of the first successful reply of ``attempt(address, seconds left)``."""
    seconds = _clients.timeout_s if timeout_s is None else timeout_s
    fix = _LIMIT_FIX if seconds == _clients.timeout_s else ""
    deadline = Deadline(seconds, f"the {what} of POST {url}", fix)
    problem = ""
    for number in range(max_retries + 1):
        if number:
            # jitter: requests that failed together must not arrive together again, also in processes with one seed
            jitter = random.SystemRandom().uniform(0.8, 1.2)
            pause = min(_FIRST_BACKOFF_S * 2 ** (number - 1), _LAST_BACKOFF_S) * jitter
            await asyncio.sleep(min(pause, deadline.remaining))
        if deadline.remaining <= 0:
            raise RequestExpired(str(deadline.error(problem)))
        try:
            # also around _address: the search for a live engine counts against the deadline
            async with time_limit(deadline.remaining):
                reply = await attempt(await _address(url), deadline.remaining)
        except _BROKEN as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        except TimeoutError:
            raise RequestExpired(str(deadline.error(problem))) from None
        if reply.status is not None and 200 <= reply.status < 300:
            return reply.content
        problem = str(reply.content)
        if reply.status is not None and reply.status < 500 and reply.status not in _LATER:
            raise RequestRefused(f"POST {url} was refused with {problem}")  # another attempt would be refused as well
    raise EngineError(f"POST {url} failed {max_retries + 1} times in {deadline.elapsed:.1f} s, last with {problem}")


async def _address(url: Url) -> str:
    if isinstance(url, str):
        return url
    try:
        return await url()
    except EngineError as error:
        raise httpx.ConnectError(str(error)) from error  # retried, like a connection that could not be made


def _body(payload: Any) -> Any:
    # with json=None httpx would send no body at all
    return (payload() if callable(payload) else payload) or {}


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


async def get(url: str, *, timeout_s: float = _GET_TIMEOUT_S) -> Any:
    """GET once and return the JSON. Raises :class:`EngineError` on any failure."""
    try:
        response = await _clients.next().get(url, timeout=timeout_s)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise EngineError(f"GET {url} failed: {type(error).__name__}: {error}") from error
    return _content(response)


def _problem(response: httpx.Response) -> str:
    return f"status {response.status_code}: {response.text[:_MAX_QUOTED_CHARS]}"


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
