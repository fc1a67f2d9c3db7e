"""Traces as things to draw: one row per sample with its spans in lanes, or events for Perfetto.

Called by ``tools/trace_timeline_viewer.py``. Reads the plain dicts that ``trace_utils`` writes, from samples as dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["perfetto_events", "timeline_rows"]

_PD_PREFIX = {"sglang_pd_prefill": "[P] ", "sglang_pd_decode": "[D] "}


def timeline_rows(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per sample that has a trace, in order.

    Each row's ``items`` are spans (``closed_span``, ``open_span``), events and ends without a beginning
    (``orphan_end``). A lane is a depth of nesting. A span that was never closed is drawn to where something else says
    that it was over: the next span beside it, the end of one around it, or the end of the row.
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
    seen: set[str] = set()
    parent = starts.get(event.get("parent_span_id") or "")
    while parent is not None and parent["span_id"] not in seen:
        seen.add(parent["span_id"])
        yield parent
        parent = starts.get(parent.get("parent_span_id") or "")


def _clip(item: Mapping[str, Any], items: Sequence[Mapping[str, Any]], row_end: float) -> tuple[float, str]:
    """Where a span that was never closed ends on the screen, and what says so."""
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
