"""The web server of the board: static files of the page, and answers about the runs of a folder.

    GET /                               the page
    GET /api/runs                       state and last values of every run
    GET /api/run?run=                   command, machine, settings, which rollouts there are
    GET /api/metrics?run=&x=            all curves over one of curves.AXES
    GET /api/metrics.csv?run=&name=     all points; run and name may repeat, without name all metrics
    GET /api/samples?run=&...           rows of the table (fields of SampleQuery)
    GET /api/sample?run=&kind=&rollout=&position=

``run`` is a name in the list. Without it the newest run answers. Listens on loopback by default, because samples are
private.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import ipaddress
import json
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from slime.board.curves import AXES
from slime.board.run_data import KINDS, RunData, SampleQuery
from slime.board.runs import Runs
from slime.utils.errors import DataError

STATIC = Path(__file__).with_name("static")
"""Folder of the page."""
# The page sets all texts as text, never as HTML, and this policy forbids scripts of other origins.
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# A larger reply would block the page.
_MOST_ROWS = 500
_LARGEST = 2**31


def make_app(runs: Runs, *names: str) -> Starlette:
    """The application over the runs of a folder.

    Args:
        names: of this machine, besides localhost and addresses.
    """

    def route(path: str, read: Callable[[RunData, QueryParams], Any]) -> Route:
        async def answer(request: Request) -> Response:
            values = request.query_params
            return await _answer(lambda: read(runs.get(values.get("run", "")), values))

        return Route(path, answer)

    async def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": _POLICY})

    async def listed(_: Request) -> Response:
        return await _answer(lambda: {"folder": str(runs.folder), "runs": runs.summaries()})

    async def csv_file(request: Request) -> Response:
        values = request.query_params
        return await _answer(lambda: _csv(runs, values.getlist("run"), values.getlist("name")), "text/csv")

    routes = [
        Route("/", page),
        Route("/api/runs", listed),
        Route("/api/metrics.csv", csv_file),
        route("/api/run", lambda data, _: data.overview()),
        route("/api/metrics", lambda data, values: data.metrics(_one_of("x", AXES, values))),
        route("/api/samples", lambda data, values: data.samples(_query(values))),
        route("/api/sample", _sample),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    middleware = [
        Middleware(OwnHost, names={"localhost", *(name.lower() for name in names)}),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3),
    ]
    return Starlette(routes=routes, middleware=middleware)


def serve(runs: Runs, host: str, opened: socket.socket) -> None:
    """Serve on a bound socket until interrupted."""
    threading.Thread(target=runs.get("").warm, name="read sample tables", daemon=True).start()
    app = make_app(runs, host, socket.gethostname(), socket.getfqdn())
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[opened])


def _sample(data: RunData, values: Mapping[str, str]) -> dict[str, Any]:
    return data.sample(_one_of("kind", KINDS, values), _whole("rollout", values), _whole("position", values))


def _csv(runs: Runs, names: Sequence[str], metrics: Sequence[str]) -> str:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["run", "metric", *AXES, "value"])
    for name in names or [""]:
        data = runs.get(name)
        table.writerows([name or data.run.name, *row] for row in data.metric_rows(metrics))
    return text.getvalue()


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


async def _answer(read: Callable[[], Any], media_type: str = "application/json") -> Response:
    status = 200
    try:
        body = await run_in_threadpool(read)
    except DataError as error:
        status, body, media_type = 404, {"error": str(error)}, "application/json"
    text = body if isinstance(body, str) else json.dumps(_finite(body), allow_nan=False)
    return Response(text, status, media_type=media_type)


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
                found[item.name] = _one_of("kind", KINDS, values)
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


def _one_of(name: str, allowed: Sequence[Any], values: Mapping[str, str]) -> Any:
    """The value of ``name``, by default the first that is allowed."""
    text = values.get(name) or allowed[0]
    if text not in allowed:
        raise DataError(f"{name}={text[:50]}: must be one of {', '.join(allowed)}")
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
