"""``--engines-port``: lets engines join and leave a run, over HTTP on the driver's loopback address.

    GET    /engines                               number, model, state and address of each engine
    POST   /engines {"count": 3}                  engines join or leave until there are three
    POST   /engines {"address": "HOST:PORT"}      the server at this address joins
    DELETE /engines/2                             engine 2 leaves

Every answer is that of GET, or {"error": "..."} with status 400 (a wrong request), 404 or 409 (it cannot be done now).
Changes begin at once and go on after the answer. ``progress.json`` has the address as ``engines_url``.
"""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from ray.exceptions import RayError

from slime.ray.engines.recovery import RemoteEngines
from slime.ray.engines.servers import RolloutServers
from slime.ray.watch.failure_report import message_of
from slime.utils.errors import ConfigError, SlimeError

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_REQUEST_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_LARGEST_BODY = 64 * 1024
_MOST_DIGITS = 9
_USAGE = 'GET /engines, POST /engines {"count": N} or {"address": "HOST:PORT"}, DELETE /engines/NUMBER'


class _Wrong(Exception):
    """A request that cannot be understood."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class EnginePort:
    """The server. Requests are answered one after the other, in a thread.

    Args:
        port: 0 takes any free one.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(self, engines: RemoteEngines, port: int) -> None:
        # One thread: two changes at the same time would count the same engines.
        class Handler(_Handler):
            remote = engines

        try:
            self._server = HTTPServer((_HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--engines-port {port}: cannot listen at {_HOST}: {error}. Choose a free port; 0 takes any."
            ) from None
        self.url = f"http://{_HOST}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="engines port", daemon=True)
        self._thread.start()
        logger.info("engines join and leave at %s/engines", self.url)

    def close(self) -> None:
        # In a thread: a client that sends its request byte by byte would delay the end of the run.
        threading.Thread(target=self._server.shutdown, name="engines port ends", daemon=True).start()
        self._thread.join(_STOP_TIMEOUT_S)
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    remote: RemoteEngines
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body: dict[str, Any]
        try:
            self._change()
            status, body = 200, {"engines": self.remote.call(RolloutServers.engine_states)}
        except _Wrong as error:
            status, body = error.status, {"error": f"{error}. Requests are: {_USAGE}"}
        except (RayError, SlimeError) as error:
            status, body = 409, {"error": message_of(error) or f"{type(error).__name__}: {error}"}
        content = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _change(self) -> None:
        # A page in a browser of this host must not reach the port under a name of its choice.
        if (self.headers.get("Host") or "").partition(":")[0] not in (_HOST, "localhost"):
            raise _Wrong(f"the header Host must be {_HOST}", 404)
        words = self.path.strip("/").split("/")
        match self.command, words:
            case "GET", ["engines"]:
                pass
            case "DELETE", ["engines", number] if number.isdecimal() and len(number) <= _MOST_DIGITS:
                self.remote.call(RolloutServers.leave_engine, int(number))
            case "POST", ["engines"]:
                self._post(self._body())
            case _:
                raise _Wrong(f"{self.command} {self.path} is unknown", 404)

    def _post(self, body: Any) -> None:
        match body:
            case {"count": bool()}:
                raise _Wrong(f"count {body['count']} must be a number")
            case {"count": int() as count, **rest} if not rest:
                self.remote.call(RolloutServers.resize, count)
            case {"address": str() as address, **rest} if not rest:
                self.remote.call(RolloutServers.join_address, address)
            case _:
                raise _Wrong(f"{json.dumps(body)} has neither a whole number count nor a text address alone")

    def _body(self) -> Any:
        # A page of another site can send any other type without asking the browser's user.
        if self.headers.get_content_type() != "application/json":
            raise _Wrong("the header Content-Type must be application/json")
        # Without a limit one request could fill the memory of the driver.
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > _LARGEST_BODY:
            raise _Wrong(f"the header Content-Length must be a number up to {_LARGEST_BODY}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise _Wrong(f"the body is not JSON: {error}") from None

    def log_message(self, format: str, *args: Any) -> None:
        level = logging.DEBUG if self.command == "GET" else logging.INFO
        logger.log(level, "--engines-port: " + format, *args)
