"""One OpenTelemetry trace from a sample through the router into a real engine, whose own exporter continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.router import RouterProcess
from slime.data.sample import Sample
from slime.observability.trace_export import TraceExporter
from slime.observability.trace_utils import bind_trace, trace_span
from slime.rollout.sglang_rollout import generate
from slime.utils.async_utils import Deadline, run, wait_until
from tests.e2e.engines import make_engine
from tests.unit.observability.collector import Collector
from tests.unit.observability.test_trace_export import settings
from tests.unit.rollout.fake_engine import make_args

pytestmark = pytest.mark.e2e
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="engines export with it")


PARTS = {"Req", "tokenize", "prefill_forward", "decode_forward"}
"""Beginnings of the names of an engine's spans, from its tokenizer and its scheduler."""


def names(collector: Collector) -> set[str]:
    return {span.name.split()[0] for span in collector.spans}


def test_the_engine_continues_the_trace_of_the_sample_behind_the_router(
    tiny_task: Any, fork_server: Any, tmp_path: Path
) -> None:
    collector = Collector()
    router = RouterProcess("127.0.0.1", None, request_timeout_s=600, log_path=tmp_path / "router.log")
    flags = ("--enable-trace", "--otlp-traces-endpoint", f"{collector.url}/v1/traces")
    env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    engine = make_engine(tiny_task, fork_server, tmp_path / "engine.log", *flags, env=env)
    left_out, traced = Sample(index=3, prompt="a"), Sample(index=4, prompt="a")
    try:
        engine.start()
        router.wait_ready()
        engine.register(router.url)
        for sample, share in ((left_out, 0.0), (traced, 1.0)):
            own = vars(settings(collector.url, share))
            args = make_args(tiny_task.model, router.port, rollout_request_timeout=600.0, **own)
            with trace_span(sample, "generate_and_rm"):
                run(generate(args, sample, {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}))
        exporter = TraceExporter(settings(collector.url))
        exporter.export([traced])
        exporter.flush(600.0)
        wait_until(lambda: names(collector) >= PARTS, Deadline(600.0, "the engine's spans", "the limit of this test"))
    finally:
        engine.stop()
        router.stop()
        collector.stop()
    assert {span.trace_id.hex() for span in collector.spans} == {bind_trace(traced).trace_id}
    parents = {span.span_id: span.parent_span_id for span in collector.spans}
    (request,) = (span.span_id for span in collector.spans if span.name == "sglang_generate")
    for span in collector.spans:
        above = span.span_id
        while above != request and above:
            above = parents[above]
        assert (above == request) == (span.name != "generate_and_rm"), span.name
