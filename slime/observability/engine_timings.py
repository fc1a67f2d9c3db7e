"""Timings in the replies of SGLang, as attributes of the span around the request. Added when a request ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
