"""The log-prob server over HTTP: routes, statuses, a warm-up request before it serves, and its entry point.

    python -m slime.backends.megatron_utils.server.megatron_server --help

    GET  /detect /healthz /info /get_loads
    POST /generate                     400 bad request, 413 too long, 503 while weights are loaded, 500 anything else
    POST /update_weights_from_disk     400 no weights there, 409 others are being loaded, 503 not idle in time

JSON in, JSON out. Serves a ``ScoreQueue``. ``slime.ray.logprob_server`` starts it. The path of this module is public.
"""

from __future__ import annotations

import dataclasses
import logging
import runpy
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from slime.backends.megatron_utils.server.arguments import TeacherServerArgs
from slime.backends.megatron_utils.server.queue import Busy, ScoreQueue, TooLong, Updating, parse_request
from slime.utils.errors import ConfigError, DataError, DeadlineExceeded, SlimeError

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 1024**2
_WARMUP_IDS = (101, 102, 103, 104)
_LOOPBACK = "127.0.0.1"
# The first match counts: a subclass comes before its base.
_STATUS: dict[type[Exception], int] = {
    TooLong: 413,
    Updating: 503,
    Busy: 409,
    DeadlineExceeded: 503,
    ConfigError: 400,
    DataError: 400,
}


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The facts that requests are checked against, and the content of ``/info``.

    Attributes:
        info: arguments of the server, JSON-ready and without secrets.
    """

    vocab_size: int
    temperature: float
    info: Mapping[str, Any]


def make_app(queue: ScoreQueue, model: ServedModel, settings: TeacherServerArgs) -> web.Application:
    """The application with all routes."""

    async def detect(request: web.Request) -> web.Response:
        return web.json_response({"server_type": "megatron_server"})

    async def health(request: web.Request) -> web.Response:
        if queue.damage is not None:
            return web.json_response({"error": queue.damage}, status=500)
        return web.json_response({"ok": True})

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"args": dict(model.info)})

    async def loads(request: web.Request) -> web.Response:
        return web.json_response(queue.loads())

    async def generate(request: web.Request) -> web.Response:
        asked = parse_request(
            await _body(request),
            vocab_size=model.vocab_size,
            temperature=model.temperature,
            max_length=settings.megatron_server_max_length,
        )
        score = await queue.ask(asked)
        values = {name: value for name, value in vars(score).items() if value is not None}
        return web.json_response({"request_id": uuid.uuid4().hex} | values)

    async def update(request: web.Request) -> web.Response:
        body = await _body(request)
        path = next((body[name] for name in ("model_path", "path", "load") if body.get(name)), None)
        if not isinstance(path, str):
            raise DataError("model_path must name a checkpoint directory.")
        seconds = body.get("timeout_s", settings.megatron_server_update_timeout_s)
        if type(seconds) not in (int, float) or seconds <= 0:  # isinstance would accept true
            raise DataError(f"timeout_s {seconds!r} must be a number above 0.")
        return web.json_response(await queue.update(path, float(seconds)))

    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
    gets = {"/detect": detect, "/healthz": health, "/info": info, "/get_loads": loads}
    app.add_routes([web.get(path, handler) for path, handler in gets.items()])
    app.add_routes([web.post("/generate", generate), web.post("/update_weights_from_disk", update)])
    return app


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:  # no JSON, or no text
        raise DataError(f"the body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise DataError("the body must be a JSON object.")
    return body


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)
    except Exception as error:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
        if status == 500 and not isinstance(error, SlimeError):
            logger.exception("%s %s failed", request.method, request.path)
        more = {"input_length": error.length, "max_length": error.limit} if isinstance(error, TooLong) else {}
        return web.json_response({"error": str(error)} | more, status=status)


@asynccontextmanager
async def serving(app: web.Application, host: str, port: int) -> AsyncIterator[None]:
    """Serve the application at ``host``:``port`` inside the block.

    Raises:
        ConfigError: the address cannot be used.
    """
    # if a client disconnects, its handler is cancelled, which removes the request from the queue
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"the log-prob server cannot listen on {host}:{port}: {error.strerror}.") from None
        yield
    finally:
        await runner.cleanup()


async def warm_up(app: web.Application, vocab_size: int, settings: TeacherServerArgs) -> None:
    """Score a few tokens through the whole server, on a loopback port before it serves.

    Raises:
        SlimeError: the answer is late or has no log-probs.
    """
    port, seconds = settings.teacher_warmup_port, settings.teacher_warmup_timeout_s
    body = {"input_ids": [token % vocab_size for token in _WARMUP_IDS]}
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds))
    try:
        async with (
            serving(app, _LOOPBACK, port),
            session,
            session.post(f"http://{_LOOPBACK}:{port}/generate", json=body) as response,
        ):
            reply = await response.json()
    except TimeoutError:
        raise DeadlineExceeded(f"the warm-up request took longer than --teacher-warmup-timeout-s {seconds}.") from None
    if response.status != 200 or len(reply["log_probs"]) != len(_WARMUP_IDS) - 1:
        raise SlimeError(f"the warm-up request failed with status {response.status}: {reply}")


if __name__ == "__main__":
    runpy.run_module("slime.ray.logprob_server", run_name="__main__", alter_sys=True)
