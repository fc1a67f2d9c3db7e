"""The web server of the board: static files of the page, and JSON answers about one run.

    GET /                       the page
    GET /api/run                name, command, which rollouts there are
    GET /api/metrics            all curves
    GET /api/samples?...        rows of the table (fields of SampleQuery)
    GET /api/sample?kind=&rollout=&position=

Listens on loopback by default, because samples are private.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import socket
import threading
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from slime.board.run_data import RunData, SampleQuery
from slime.utils.errors import DataError

_STATIC = Path(__file__).with_name("static")
# The page sets all texts as text, never as HTML, and this policy forbids scripts of other origins.
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# A larger reply would block the page.
_MOST_ROWS = 500
_LARGEST = 2**31


def make_app(data: RunData, *names: str) -> Starlette:
    """The application over one run.

    Args:
        names: of this machine, besides localhost and addresses.
    """

    async def page(_: Request) -> Response:
        return FileResponse(_STATIC / "index.html", headers={"Content-Security-Policy": _POLICY})

    async def run(_: Request) -> Response:
        return await _answer(data.overview)

    async def metrics(_: Request) -> Response:
        return await _answer(data.metrics)

    async def samples(request: Request) -> Response:
        return await _answer(lambda: data.samples(_query(request.query_params)))

    async def sample(request: Request) -> Response:
        values = request.query_params

        def read() -> dict[str, Any]:
            kind = _kind(values.get("kind", "rollout"))
            return data.sample(kind, _whole("rollout", values), _whole("position", values))

        return await _answer(read)

    routes = [
        Route("/", page),
        Route("/api/run", run),
        Route("/api/metrics", metrics),
        Route("/api/samples", samples),
        Route("/api/sample", sample),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]
    middleware = [
        Middleware(OwnHost, names={"localhost", *(name.lower() for name in names)}),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3),
    ]
    return Starlette(routes=routes, middleware=middleware)


def serve(data: RunData, host: str, port: int) -> None:
    """Serve until interrupted."""
    threading.Thread(target=data.warm, name="read sample tables", daemon=True).start()
    app = make_app(data, host, socket.gethostname(), socket.getfqdn())
    uvicorn.run(app, host=host, port=port, log_level="warning", lifespan="off")


class OwnHost:
    """Refuses requests with a foreign Host header."""

    # Prevents DNS rebinding: a foreign web page could otherwise read the run through the browser of a visitor.
    # starlette's TrustedHostMiddleware cannot allow "any address".

    def __init__(self, app: ASGIApp, names: Set[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_own(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
        else:
            await Response("the Host header is not a name of this machine", 400)(scope, receive, send)

    def _is_own(self, header: str) -> bool:
        try:
            host = urlsplit("//" + header).hostname
            # DNS cannot change an address, so every address is accepted.
            return host in self._names or bool(ipaddress.ip_address(host or ""))
        except ValueError:
            return False


async def _answer(read: Callable[[], Any]) -> Response:
    status = 200
    try:
        body = await run_in_threadpool(read)
    except DataError as error:
        status, body = 404, {"error": str(error)}
    return Response(json.dumps(_finite(body), allow_nan=False), status, media_type="application/json")


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None. The page shows a dash."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list():
            return [_finite(item) for item in value]
        case _:
            return value


def _query(values: Mapping[str, str]) -> SampleQuery:
    """The query of a URL. Empty values are ignored."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(SampleQuery):
        text = values.get(item.name, "")
        if text == "":
            continue
        match str(item.type):
            case "Kind":
                found[item.name] = _kind(text)
            case "bool":
                found[item.name] = text == "true"
            case "int" | "int | None":
                found[item.name] = _whole(item.name, values)
            case "float | None":
                found[item.name] = _real(item.name, text)
            case _:
                found[item.name] = text
    query = SampleQuery(**found)
    return dataclasses.replace(query, limit=max(1, min(query.limit, _MOST_ROWS)), offset=max(0, query.offset))


def _kind(text: str) -> Any:
    if text not in ("rollout", "eval"):
        raise DataError(f"kind={text}: must be rollout or eval")
    return text


def _whole(name: str, values: Mapping[str, str]) -> int:
    text = values.get(name, "")
    try:
        number = int(text)
    except ValueError:
        number = _LARGEST
    if abs(number) >= _LARGEST:
        raise DataError(f"{name}={text[:50]}: must be a whole number below 2**31")
    return number


def _real(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{name}={text}: must be a number") from None
