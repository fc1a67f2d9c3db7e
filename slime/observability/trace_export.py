"""Spans of samples for an OpenTelemetry collector (``--trace-endpoint``), and the header that engines continue them by.

    sample.trace --TraceExporter--> OTLP over HTTP, as JSON --> collector
    traceparent header --> router --> engine --their own exporters--> the same trace of the collector

A trace of ``trace_utils`` has ids of the form that OpenTelemetry needs. Called by the rollout manager. A collector that
is away costs spans, never a sample.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from slime.config.groups import RunConfig
from slime.data.ledger import ledger_path
from slime.data.sample import Sample
from slime.data.schedule import SCHEDULE, Schedule
from slime.observability.arguments import OutputArgs
from slime.observability.sample_record import BackgroundWriter, record_rollout
from slime.observability.trace_utils import SPAN_ID, is_exported
from slime.observability.tracking import run_directory

logger = logging.getLogger(__name__)

_PATH = "/v1/traces"
_SPANS_AT_ONCE = 1000
_TIMEOUT_S = 10.0
_FLUSH_TIMEOUT_S = 5.0
_MOST_WAITING = 16  # rollouts
_LONGEST_TEXT = 2000
_ERROR = 2  # STATUS_CODE_ERROR


class TraceExporter:
    """Sends the traces of finished samples to ``--trace-endpoint``, from its own thread."""

    def __init__(self, settings: OutputArgs) -> None:
        base = (settings.trace_endpoint or "").rstrip("/")
        self._url = base if not base or base.endswith(_PATH) else base + _PATH
        self._share = settings.trace_share
        self._resource = {"service.name": "slime", "slime.experiment": settings.experiment_name or ""}
        self._writer = BackgroundWriter(_MOST_WAITING)
        # Collectors are inside the cluster: a proxy of the environment is for the outside.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._has_failed = False

    def export(self, samples: Iterable[Sample]) -> None:
        """Send the finished traces of ``samples``. Does not wait for the collector, and raises nothing."""
        if not self._url:
            return
        found = (vars(sample).get("trace") for sample in samples)
        traces = [trace for trace in found if trace and is_exported(str(trace["trace_id"]), self._share)]
        try:
            self._writer.submit(lambda: self._send(traces), timeout_s=0.0)
        except TimeoutError:
            self._complain(f"it did not answer while {_MOST_WAITING} rollouts ended")

    def flush(self, timeout_s: float) -> None:
        """Wait until the spans are sent."""
        if not self._writer.flush(timeout_s):
            self._complain(f"the last spans were not sent in {timeout_s:g} s")

    def _send(self, traces: Sequence[Mapping[str, Any]]) -> None:
        spans = [span for trace in traces for span in otlp_spans(trace)]
        for i in range(0, len(spans), _SPANS_AT_ONCE):
            body = json.dumps(otlp_request(spans[i : i + _SPANS_AT_ONCE], self._resource)).encode()
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"} | _headers())
            try:
                self._open(request, timeout=_TIMEOUT_S).close()
            except OSError as error:  # HTTP errors too
                self._complain(str(error))
                return

    def _complain(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("--trace-endpoint %s: spans are lost, further failures are not shown: %s", self._url, reason)


def _headers() -> dict[str, str]:
    """Keys of a collector, in the form of OpenTelemetry: ``name=value,name=value``, with URL encoding."""
    pairs = (item.partition("=") for item in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if item)
    return {name.strip(): urllib.parse.unquote(value.strip()) for name, _, value in pairs}


def otlp_request(spans: Sequence[Mapping[str, Any]], resource: Mapping[str, Any]) -> dict[str, Any]:
    """``ExportTraceServiceRequest`` in the JSON form of OTLP."""
    scopes = [{"scope": {"name": "slime"}, "spans": list(spans)}]
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": scopes}]}


def otlp_spans(trace: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of one trace. A span without an end gets the time of the last event, and ``slime.is_open``."""
    events = trace["events"]
    last = max((event["ts"] for event in events), default=0.0)
    ends = {event.get("span_id"): event for event in events if event["type"] == "span_end"}
    points: dict[str | None, list[dict[str, Any]]] = {}
    for event in events:
        if event["type"] == "event":
            point = {"name": event["name"], "timeUnixNano": _nanoseconds(event["ts"])}
            point["attributes"] = _attributes(event.get("attrs", {}))
            points.setdefault(event.get("parent_span_id"), []).append(point)
    for event in events:
        if event["type"] != "span_start" or not SPAN_ID.fullmatch(str(event.get("span_id"))):
            continue
        end = ends.get(event["span_id"])
        attrs = {f"slime.{name}": trace.get(name) for name in ("sample_id", "group_id")}
        attrs |= {"slime.attempt": event.get("attempt")} | event.get("attrs", {}) | (end or {}).get("attrs", {})
        span: dict[str, Any] = {
            "traceId": trace["trace_id"],
            "spanId": event["span_id"],
            "parentSpanId": event.get("parent_span_id") or "",
            "name": event["name"],
            "kind": 1,  # SPAN_KIND_INTERNAL
            "startTimeUnixNano": _nanoseconds(event["ts"]),
            "endTimeUnixNano": _nanoseconds(end["ts"] if end else last),
            "attributes": _attributes(attrs if end else attrs | {"slime.is_open": True}),
            "events": points.get(event["span_id"], []),
        }
        if "error_type" in attrs:
            span["status"] = {"code": _ERROR, "message": f"{attrs['error_type']}: {attrs.get('error_message', '')}"}
        yield span


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": str(name), "value": _value(value)} for name, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)[:_LONGEST_TEXT]}


class FinishedSamples:
    """The destinations of samples when a rollout or evaluation has ended: ``<run>/samples`` and ``--trace-endpoint``.

    Writes and sends in threads: the caller waits only while a disk is far behind. In deterministic mode rollouts also
    go into the schedule (``slime.data.schedule``).
    """

    def __init__(self, config: RunConfig) -> None:
        args, settings, run = config.args, config[OutputArgs], run_directory(config.args)
        self._records = BackgroundWriter()
        self._record = functools.partial(
            record_rollout, run, limit=settings.record_samples, reward_key=args.reward_key, writer=self._records
        )
        self._traces = TraceExporter(settings)
        if args.deterministic_mode:
            Schedule.current = Schedule(ledger_path(args.save, run).with_name(SCHEDULE))

    def begin(self, rollout_id: int) -> None:
        """Begin with ``rollout_id``: the run makes it and later rollouts anew."""
        if Schedule.current is not None:
            Schedule.current.begin(rollout_id)

    def write(self, samples: Sequence[Sample], rollout_id: int, kind: Literal["rollout", "eval"]) -> None:
        self._traces.export(samples)
        if Schedule.current is not None and kind == "rollout":
            Schedule.current.batch(rollout_id, samples)
        self._record(samples, rollout_id=rollout_id, kind=kind)

    def flush(self) -> None:
        """Wait for the last files and spans."""
        if not self._records.flush(_FLUSH_TIMEOUT_S):
            logger.warning("the last files in <run>/samples were not written in %g s", _FLUSH_TIMEOUT_S)
        self._traces.flush(_FLUSH_TIMEOUT_S)
