"""Simulated HTTP: servers by url, messages with delays, losses, duplicates and partitions, and a router.

``Client`` stands in for ``httpx.AsyncClient``. Its errors and responses are those of httpx.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json as json_module
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from slime.utils.errors import EngineError
from tests.simulation.world import Process, World, world

Answer = Callable[[int, Any], None]
_LATENCY_S = 0.002
_SILENCE_S = 120.0  # TCP keepalive of http_utils: after this time a silent connection fails
_REFUSED, _BROKEN = 0, -1


_request = functools.lru_cache(maxsize=64)(httpx.Request)  # it parses the url


def _ignored(status: int, content: Any) -> None:
    """An answer without a reader."""


class Server:
    """Something that answers requests at ``url``. Subclasses implement :meth:`handle`."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url = process, url
        network().servers[url] = self
        self.open: dict[Exchange, None] = {}
        process.on_death.append(self._break)

    def handle(self, exchange: Exchange) -> None:
        raise NotImplementedError

    def _break(self) -> None:
        for exchange in list(self.open):
            exchange.fail()


class Exchange:
    """One request at a server, and its answer. ``on_close`` is called if the client leaves."""

    def __init__(self, server: Server, method: str, path: str, body: Any, answer: Answer) -> None:
        self.server, self.method, self.path, self.body = server, method, path, body
        self._answer = answer
        self.is_over = False
        self.on_close: Callable[[], None] | None = None
        server.open[self] = None

    def reply(self, status: int, content: Any) -> None:
        """Send the answer, unless the server is dead by then or the client has left."""
        if not (self.is_over or self.server.process.is_dead):
            self._end()(status, content)

    def fail(self) -> None:
        if not self.is_over:
            self._end()(_BROKEN, None)

    def close(self) -> None:
        """The client leaves."""
        if not self.is_over:
            on_close = self.on_close
            self._end()
            if on_close is not None:
                on_close()

    def _end(self) -> Answer:
        """Returns the function that takes the answer."""
        self.is_over = True
        self.server.open.pop(self, None)
        # without cycles of references the collector has little to do
        answer, self._answer, self.on_close = self._answer, _ignored, None
        return answer


class _Request:
    """A request of a process on its way, and its answer on the way back."""

    def __init__(self, network: Network, sender: Process, answer: Answer) -> None:
        self._network, self._sender, self._answer = network, sender, answer
        self._is_over = False
        self._exchange: Exchange | None = None
        self.reply_is_lost = False

    def finish(self, status: int, content: Any) -> None:
        """Give the answer to the sender, once."""
        if not self._is_over and not self._sender.is_dead:
            self._is_over = True
            self._answer(status, content)

    def close(self) -> None:
        """The sender closes the connection."""
        self._is_over = True
        if self._exchange is not None:
            self._exchange.close()

    def arrive(self, server: Server, method: str, path: str, body: Any, has_reader: bool) -> None:
        if self._is_over:
            return
        if server.process.is_dead:
            self.finish(_REFUSED, None)
        elif server.process.is_paused:  # the kernel accepts the connection, nothing answers
            world().at(0.5, lambda: self.arrive(server, method, path, body, has_reader))
        elif has_reader:
            answer = functools.partial(self._reply, server.process)
            self._exchange = Exchange(server, method, path, body, answer)
            server.handle(self._exchange)
        else:
            server.handle(Exchange(server, method, path, body, _ignored))

    def _reply(self, receiver: Process, status: int, content: Any) -> None:
        self._exchange = None
        back_s = self._network.delay_s(receiver, self._sender, _LATENCY_S)
        if self.reply_is_lost or status < 0 or back_s > _SILENCE_S:
            status, content = _BROKEN, None
        world().at(min(back_s, _SILENCE_S), lambda: self.finish(status, content))


class Network:
    """Faults are set by ``faults``: they hold until the times in the fields.

    Attributes:
        loss, duplicates: shares of messages while the network is bad.
    """

    def __init__(self, here: World) -> None:
        self._world = here
        self.servers: dict[str, Server] = {}
        self.loss = self.duplicates = 0.0
        self.extra_delay_s = 0.0
        self.is_cut_until: dict[Process, float] = {}

    def delay_s(self, sender: Process, receiver: Process, base_s: float) -> float:
        """Time until a message arrives: TCP holds it back during a partition."""
        here = self._world
        delay_s = base_s * (0.5 + here.random.random()) + self.extra_delay_s * here.random.random()
        if self.is_cut_until:
            until = max(self.is_cut_until.get(process, 0.0) for process in (sender, receiver))
            delay_s += max(0.0, until - here.now)
        return delay_s

    def request(self, sender: Process, method: str, url: str, body: Any, answer: Answer) -> Callable[[], None]:
        """Send a request. Returns a function that closes the connection."""
        here, parts = self._world, urlsplit(url)
        server = self.servers.get(f"{parts.scheme}://{parts.netloc}")
        request = _Request(self, sender, answer)
        if server is None or server.process.is_dead:
            here.at(_LATENCY_S, lambda: request.finish(_REFUSED, None))
            return request.close
        here.note(f"http {sender.name} {method} {server.process.name}{parts.path}")
        is_lost, request.reply_is_lost = here.chance(self.loss), here.chance(self.loss)
        there = self.delay_s(sender, server.process, _LATENCY_S)
        if there > _SILENCE_S:
            here.at(_SILENCE_S, lambda: request.finish(_BROKEN, None))
            return request.close
        if is_lost:  # with the connection
            here.at(there, lambda: request.finish(_BROKEN, None))
        for at_s, has_reader in self._arrivals(is_lost, there, self.delay_s(sender, server.process, 0.1)):
            here.at(at_s, functools.partial(request.arrive, server, method, parts.path, body, has_reader))
        return request.close

    def _arrivals(self, is_lost: bool, there_s: float, late_s: float) -> list[tuple[float, bool]]:
        """When a request arrives, and whether its answer has a reader. The sender gets the answer to the first one."""
        arrivals = [(there_s, True)]
        if is_lost:  # it may have arrived before, and then it runs without a reader
            arrivals = [(there_s / 2, False)] if self._world.chance(0.5) else []
        if self._world.chance(self.duplicates):
            arrivals.append((there_s + late_s, False))
        return arrivals

    def call(self, method: str, url: str, body: Any = None, timeout_s: float = 10.0) -> Any:
        """A request of the running thread, which waits for it. Raises EngineError."""
        here = self._world
        me, found = here.current, []

        def answer(status: int, content: Any) -> None:
            found.append((status, content))
            here.wake(me)

        close = self.request(me.process, method, url, body, answer)
        here.park(timeout_s)
        if not found:
            close()
            raise EngineError(f"{method} {url}: no answer within {timeout_s:g} s")
        status, content = found[0]
        if not 200 <= status < 300:
            raise EngineError(f"{method} {url}: {status} {content}")
        return content


def network() -> Network:
    found: Network = world().globals["network"]
    return found


class _Success:
    """``httpx.Response`` with status 200, without its cost: the simulation makes fifty of them per schedule."""

    status_code, is_success = httpx.codes.OK.value, True

    def __init__(self, text: str) -> None:
        self.text = text

    def json(self) -> Any:
        return json_module.loads(self.text)

    def raise_for_status(self) -> None: ...


class Client:
    """``httpx.AsyncClient`` as ``slime.utils.http_utils`` uses it."""

    async def post(self, url: str, json: Any = None, headers: Any = None) -> httpx.Response | _Success:
        return await self._exchange("POST", url, json)

    async def get(self, url: str, timeout: float | None = None) -> httpx.Response | _Success:
        try:
            async with asyncio.timeout(timeout):
                return await self._exchange("GET", url, None)
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from None

    async def aclose(self) -> None: ...

    async def _exchange(self, method: str, url: str, body: Any) -> httpx.Response | _Success:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[int, Any]] = loop.create_future()

        def answer(status: int, content: Any) -> None:
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result((status, content)))

        close = network().request(world().current.process, method, url, body, answer)
        try:
            status, content = await future
        except asyncio.CancelledError:
            close()
            raise
        if status == _REFUSED:
            raise httpx.ConnectError("connection refused")
        if status == _BROKEN:
            raise httpx.ReadError("connection reset by peer")
        text = json_module.dumps(content)
        if status == httpx.codes.OK:
            return _Success(text)
        return httpx.Response(status, content=text.encode(), request=_request(method, url))


class RouterServer(Server):
    """sglang-router: spreads requests over the registered engines."""

    def __init__(self, process: Process, url: str) -> None:
        super().__init__(process, url)
        self.workers: dict[str, str] = {}
        self._ids = itertools.count()
        self._turn = itertools.count()

    def handle(self, exchange: Exchange) -> None:
        if exchange.path == "/workers" and exchange.method == "GET":
            workers = [{"id": key, "url": url, "is_healthy": True} for key, url in self.workers.items()]
            exchange.reply(200, {"workers": workers})
        elif exchange.path == "/workers":
            url = exchange.body["url"]
            if url not in self.workers.values():
                self.workers[f"w{next(self._ids)}"] = url
            world().note(f"registered {url}")
            exchange.reply(200, {})
        elif exchange.method == "DELETE":
            self.workers.pop(exchange.path.rpartition("/")[2], None)
            exchange.reply(200, {})
        else:
            self._forward(exchange)

    def _forward(self, exchange: Exchange) -> None:
        urls = list(self.workers.values())
        if not urls:
            exchange.reply(503, "no workers")
            return
        url = urls[next(self._turn) % len(urls)]

        def answer(status: int, content: Any) -> None:
            exchange.reply(*((502, "the worker failed") if status <= 0 else (status, content)))

        exchange.on_close = network().request(self.process, "POST", f"{url}{exchange.path}", exchange.body, answer)


class RouterProcess:
    """``slime.backends.sglang_utils.router.RouterProcess``."""

    is_ours = True

    def __init__(self, host: str, port: int | None, **settings: Any) -> None:
        here = world()
        process = here.process("router")
        here.current.process.on_death.append(lambda: here.kill(process))
        self.host, self.port = f"router{process.number}", 80
        self._process = process
        RouterServer(process, self.url)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_ready(self) -> None:
        world().sleep(0.2)

    def raise_if_dead(self) -> None:
        from slime.utils.errors import ProcessDied

        if self._process.is_dead:
            raise ProcessDied(f"the router at {self.url} ended with status -9.")

    def stop(self) -> None:
        world().kill(self._process)


def registered_workers(router_url: str) -> list[str]:
    """``slime.backends.sglang_utils.router.registered_workers``."""
    return [worker["url"] for worker in network().call("GET", f"{router_url}/workers")["workers"]]


def remove_worker(router_url: str, worker_url: str) -> None:
    """``slime.backends.sglang_utils.router.remove_worker``."""
    for worker in network().call("GET", f"{router_url}/workers")["workers"]:
        if worker["url"] == worker_url:
            network().call("DELETE", f"{router_url}/workers/{worker['id']}")
