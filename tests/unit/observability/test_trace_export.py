"""Spans for OpenTelemetry: one trace from the sample through router and engine to the collector."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.observability.arguments import OutputArgs
from slime.observability.trace_export import TraceExporter, otlp_spans
from slime.observability.trace_utils import bind_trace, is_exported, trace_event, trace_headers, trace_span
from slime.utils.async_utils import Deadline, wait_until
from slime.utils.net import free_port
from tests.unit.observability.collector import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


def settings(url: str | None, share: float = 1.0) -> OutputArgs:
    return OutputArgs(trace_endpoint=url, trace_share=share, experiment_name="mine")


def traced_sample() -> Sample:
    sample = Sample(index=4, group_index=1)
    with trace_span(sample, "generate_and_rm"):
        with trace_span(sample, "sglang_generate", attrs={"max_new_tokens": 8}) as span:
            span.set("ratio", 0.5)
            trace_event(sample, "first_token", attrs={"ok": True})
        with pytest.raises(ValueError, match="no label"), trace_span(sample, "reward_model"):
            raise ValueError("no label")
    return sample


def test_a_collector_gets_the_spans_of_a_sample_as_one_tree(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b,x-other=c")
    sample = traced_sample()
    exporter = TraceExporter(settings(collector.url))
    exporter.export([sample, Sample()])
    exporter.flush(10.0)
    root, generate, reward = collector.spans
    assert [span.name for span in collector.spans] == ["generate_and_rm", "sglang_generate", "reward_model"]
    assert {span.trace_id.hex() for span in collector.spans} == {bind_trace(sample).trace_id}
    assert root.parent_span_id == b""
    assert generate.parent_span_id == reward.parent_span_id == root.span_id
    assert root.start_time_unix_nano <= generate.start_time_unix_nano <= generate.end_time_unix_nano
    attributes = {item.key: item.value for item in generate.attributes}
    assert (attributes["slime.sample_id"].int_value, attributes["max_new_tokens"].int_value) == (4, 8)
    assert attributes["ratio"].double_value == 0.5
    assert [event.name for event in generate.events] == ["first_token"]
    assert (reward.status.code, reward.status.message) == (2, "ValueError: no label")
    assert collector.paths == ["/v1/traces"]
    assert (collector.headers[0]["x-key"], collector.headers[0]["x-other"]) == ("a b", "c")


def test_the_header_names_the_span_of_the_request_so_the_engine_continues_it(collector: Collector) -> None:
    sample = Sample()
    with trace_span(sample, "generate_and_rm"), trace_span(sample, "sglang_generate"):
        header = trace_headers(settings(collector.url), sample)["traceparent"]
        assert trace_headers(settings(None), sample) == {}
    exporter = TraceExporter(settings(f"{collector.url}/v1/traces"))
    exporter.export([sample])
    exporter.flush(10.0)
    span = collector.spans[1]
    assert header == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
    assert collector.paths == ["/v1/traces"]


def test_a_share_of_the_traces_is_exported_and_the_header_says_which(collector: Collector) -> None:
    samples = [Sample(index=i) for i in range(64)]
    args = settings(collector.url, 0.5)
    flags = {}
    for sample in samples:
        with trace_span(sample, "sglang_generate"):
            flags[bind_trace(sample).trace_id] = trace_headers(args, sample)["traceparent"][-2:]
    exporter = TraceExporter(args)
    exporter.export(samples)
    exporter.flush(10.0)
    exported = {span.trace_id.hex() for span in collector.spans}
    assert exported == {trace_id for trace_id, flag in flags.items() if flag == "01"}
    assert 0 < len(exported) < 64
    assert [is_exported("f" * 32, 1.0), is_exported("0" * 32, 0.0), is_exported("x", 1.0)] == [True, False, False]


def test_a_span_that_never_ended_is_marked() -> None:
    sample = Sample()
    trace_span(sample, "hangs").__enter__()
    (span,) = otlp_spans(sample.trace)  # type: ignore[attr-defined]
    assert {"key": "slime.is_open", "value": {"boolValue": True}} in span["attributes"]


def test_the_router_passes_the_header_on_to_the_engine() -> None:
    """The real router, with an engine that only notes the header."""
    seen: list[str | None] = []

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({"model_path": "m", "status": "ok"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers.get("traceparent"))
            self._reply({"text": "x", "meta_info": {}})

        def _reply(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port, metrics = free_port(), free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    flags += ["--worker-urls", f"http://127.0.0.1:{server.server_port}"]
    header = f"00-{'a' * 32}-{'b' * 16}-01"

    def answers() -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", b'{"text": "a"}')
        request.add_header("Content-Type", "application/json")
        request.add_header("traceparent", header)
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except OSError:  # the router starts, or does not know the engine yet
            return False
        return True

    with subprocess.Popen([sys.executable, "-m", "sglang_router.launch_router", *flags]) as router:
        try:
            wait_until(answers, Deadline(600.0, "the router", "--engine-start-timeout"))
        finally:
            router.kill()
            server.shutdown()
            server.server_close()
    assert seen == [header]


@pytest.mark.parametrize("status", [None, 500])
def test_a_collector_that_is_away_or_refuses_is_one_warning(
    status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = Collector(status or 200)
    if status is None:
        made.stop()
    exporter = TraceExporter(settings(made.url))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            exporter.export([traced_sample()])
        exporter.flush(20.0)
    assert caplog.text.count("spans are lost") == 1
    if status is not None:
        made.stop()
