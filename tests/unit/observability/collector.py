"""A collector of OpenTelemetry for tests."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """An OTLP receiver over HTTP, of JSON and protobuf.

    Attributes:
        spans: messages of opentelemetry-proto.
        headers: of the requests, in lower case.
        paths: of the requests.
    """

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.paths.append(self.path)
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                is_json = self.headers["Content-Type"] == "application/json"
                request = _of_json(json.loads(body)) if is_json else ExportTraceServiceRequest.FromString(body)
                outer.spans += [s for sent in request.resource_spans for scope in sent.scope_spans for s in scope.spans]
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _of_json(body: Any) -> ExportTraceServiceRequest:
    for sent in body["resourceSpans"]:
        for scope in sent["scopeSpans"]:
            for span in scope["spans"]:
                # OTLP writes ids in hexadecimal, the JSON of protobuf in base64.
                for name in ("traceId", "spanId", "parentSpanId"):
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return json_format.ParseDict(body, ExportTraceServiceRequest())
