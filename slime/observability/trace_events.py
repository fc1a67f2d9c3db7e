"""Traces for viewers (rows with spans in lanes, events for Perfetto), and SGLang's timings as trace attributes.

Called by ``tools/trace_timeline_viewer.py``. Reads the plain dicts that ``trace_utils`` writes, from samples as dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# Marks of prefill and decode in the viewer.
_PD_PREFIX = {"sglang_pd_prefill": "[P] ", "sglang_pd_decode": "[D] "}


def timeline_rows(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per sample that has a trace, in order.

    Each row's ``items`` are spans (``closed_span``, ``open_span``), events and ends without a beginning
    (``orphan_end``). A lane is a depth of nesting. A span that was never closed is drawn until the next span beside it,
    the end of a span around it, or the end of the row, whichever is first.
    """
    return [_row(number, sample) for number, sample in enumerate(samples) if _events(sample)]


def perfetto_events(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``traceEvents`` of the Chrome trace format: a process per prompt, a thread per sample, microseconds."""
    rows = timeline_rows(samples)
    first = min((row["start"] for row in rows), default=0.0)
    events: list[dict[str, Any]] = []
    for row in rows:
        place = {"pid": row["group_index"] if isinstance(row["group_index"], int) else 0, "tid": row["row_id"]}
        events.append({"name": "process_name", "ph": "M", **place, "args": {"name": f"prompt {row['group_index']}"}})
        named = f"sample {row['sample_index']} reward {row['reward']}"
        events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": named}})
        for item in row["items"]:
            moment = {"name": item["name"], **place, "ts": (item["start_ts"] - first) * 1e6, "args": _arguments(item)}
            if item["state"] in ("event", "orphan_end"):
                events.append(moment | {"ph": "i", "s": "t"})
            else:
                events.append(moment | {"ph": "X", "dur": (item["display_end_ts"] - item["start_ts"]) * 1e6})
    return events


def _arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    attrs = item["attrs"]
    return {**attrs["start_attrs"], **attrs["end_attrs"], "attempt": item["attempt"], "state": item["state"]}


def _events(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    trace = sample.get("trace")
    return list(trace.get("events") or []) if isinstance(trace, Mapping) else []


def _row(number: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    events = sorted(_events(sample), key=lambda event: event["ts"])
    start, end = events[0]["ts"], events[-1]["ts"]
    items = _items(events, end)
    states = [item["state"] for item in items]
    metadata = sample.get("metadata")
    return {
        "row_id": number,
        "sample_index": sample.get("index"),
        "group_index": sample.get("group_index"),
        "source": metadata.get("source_name") if isinstance(metadata, Mapping) else None,
        "status": sample.get("status"),
        "label": str(sample.get("label"))[:200],
        "reward": sample.get("reward"),
        "trace_id": sample["trace"].get("trace_id"),
        "attempt": sample["trace"].get("attempt", 0),
        "start": start,
        "end": end,
        "duration": end - start,
        "lane_count": 1 + max((item["lane"] for item in items), default=0),
        "item_count": len(items),
        "closed_count": states.count("closed_span"),
        "open_count": states.count("open_span"),
        "point_count": states.count("event"),
        "orphan_count": states.count("orphan_end"),
        "total_response_length": sample.get("response_length", 0),
        "max_response_length": sample.get("response_length", 0),
        "items": items,
    }


def _items(events: Sequence[Mapping[str, Any]], row_end: float) -> list[dict[str, Any]]:
    ends = {event["span_id"]: event for event in events if event["type"] == "span_end" and "span_id" in event}
    starts = {event["span_id"]: event for event in events if event["type"] == "span_start"}
    items = []
    for event in events:
        is_end = event["type"] == "span_end"
        # The item of its start shows this end.
        if is_end and event.get("span_id") in starts:
            continue
        end = ends.get(event.get("span_id", "")) if event["type"] == "span_start" else None
        state = {"event": "event", "span_end": "orphan_end"}.get(
            event["type"], "open_span" if end is None else "closed_span"
        )
        parents = list(_parents(event, starts))
        items.append(
            {
                "state": state,
                "name": _PD_PREFIX.get(event["name"], "") + event["name"],
                "start_ts": event["ts"],
                "end_ts": end["ts"] if end else None,
                "display_end_ts": end["ts"] if end else event["ts"],
                "attempt": event.get("attempt", 0),
                "span_id": event.get("span_id"),
                "parent_span_id": event.get("parent_span_id"),
                "parent_name": parents[0]["name"] if parents else None,
                # An event is drawn in the lane of its span.
                "lane": max(0, len(parents) - (event["type"] == "event")),
                "attrs": {
                    "start_attrs": {} if is_end else event.get("attrs", {}),
                    "end_attrs": (event if is_end else end or {}).get("attrs", {}),
                },
            }
        )
    for item in items:
        if item["state"] == "open_span":
            item["display_end_ts"], item["clipped_by"] = _clip(item, items, row_end)
    return items


def _parents(event: Mapping[str, Any], starts: Mapping[str, Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Innermost first."""
    # A damaged trace may contain a cycle.
    seen: set[str] = set()
    parent = starts.get(event.get("parent_span_id") or "")
    while parent is not None and parent["span_id"] not in seen:
        seen.add(parent["span_id"])
        yield parent
        parent = starts.get(parent.get("parent_span_id") or "")


def _clip(item: Mapping[str, Any], items: Sequence[Mapping[str, Any]], row_end: float) -> tuple[float, str]:
    """(end on the screen, reason) of a span that was never closed."""
    begin, parent = item["start_ts"], item["parent_span_id"]
    candidates = [(row_end, "end of the row")]
    for other in items:
        if other["span_id"] is None or other is item:
            continue
        if other["parent_span_id"] == parent and other["start_ts"] > begin:
            candidates.append((other["start_ts"], f"next: {other['name']}"))
        if other["span_id"] == parent and other["end_ts"] is not None:
            candidates.append((other["end_ts"], f"end of {other['name']}"))
    return min(candidates)


# Timings in the replies of SGLang, as attributes of the span around the request. Added when a request ends.
TRACE_CHILDREN_KEY = "_trace_children"
"""Attribute of a span that holds synthetic child spans and events, placed by seconds from the span's start."""

SGLANG_TRACE_META_KEYS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "queue_time",
    "e2e_latency",
    "decode_throughput",
)
SGLANG_PD_PREFILL_SEGMENTS = ("bootstrap_queue", "bootstrap", "alloc_wait", "forward", "transfer_queue")
SGLANG_PD_DECODE_SEGMENTS = ("prealloc", "bootstrap", "alloc_wait", "transfer", "forward")
SGLANG_PD_SUMMARY_KEYS = ("pd_transfer_speed_gb_s", "pd_transfer_total_mb", "pd_prefill_retry_count")
# Phase -> (key of the reply, name of the span) of its segments, in their order.
_PHASES = {
    phase: [(f"pd_{phase}_{segment}_duration", f"sglang_pd_{phase}_{segment}") for segment in segments]
    for phase, segments in (("prefill", SGLANG_PD_PREFILL_SEGMENTS), ("decode", SGLANG_PD_DECODE_SEGMENTS))
}
# Key of the reply -> attribute of the summary. Some engines count the transfer as a part of the prefill.
_SUMMARY = {key: key for key in SGLANG_PD_SUMMARY_KEYS} | {
    f"pd_prefill_{key}": f"pd_{key}" for key in ("transfer_speed_gb_s", "transfer_total_mb")
}
_OF_PHASES = frozenset([*_SUMMARY, *(key for segments in _PHASES.values() for key, _ in segments)])


def build_sglang_meta_trace_attrs(meta: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a request's span, from the ``meta_info`` of its reply.

    Engines that separate prefill and decode report seconds per phase (``pd_prefill_forward_duration``, ...): they
    become child spans, in the order the phases follow each other. Each key is an attribute of its child, not of the
    request.
    """
    attrs = {key: meta[key] for key in SGLANG_TRACE_META_KEYS if meta.get(key) is not None}
    reason = meta.get("finish_reason")
    if reason is not None:
        attrs["finish_reason"] = reason.get("type") if isinstance(reason, dict) else reason
    if meta.get("id") is not None:
        attrs["sglang_request_id"] = meta["id"]
    if not _OF_PHASES.isdisjoint(meta):
        children = list(_phases(meta))
        if children:
            attrs[TRACE_CHILDREN_KEY] = children
    return attrs


def _phases(meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = 0.0
    for phase, segments in _PHASES.items():
        inner, end = [], start
        for key, name in segments:
            seconds = meta.get(key)
            if isinstance(seconds, int | float) and seconds >= 0:
                inner.append(_span(name, end, end + seconds, phase, [], {key: seconds}))
                end += seconds
        if inner:
            yield _span(f"sglang_pd_{phase}", start, end, phase, inner, {})
            # The next phase begins when this one ends.
            start = end
    summary = {name: meta[key] for key, name in _SUMMARY.items() if meta.get(key) is not None}
    if summary:
        yield {"type": "event", "name": "sglang_pd_summary", "start_offset": start, "attrs": summary}


def _span(
    name: str, start: float, end: float, phase: str, children: list[dict[str, Any]], source: dict[str, Any]
) -> dict[str, Any]:
    attrs = {"phase": phase, "duration_s": end - start, **source}
    return {
        "type": "span",
        "name": name,
        "start_offset": start,
        "end_offset": end,
        "attrs": attrs,
        "children": children,
    }
