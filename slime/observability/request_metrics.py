"""Metrics of single requests, from the traces of the samples: latency, queue, speed, phases of separated engines.

Called by ``rollout_metrics``. Reads the plain dicts that ``trace_utils`` writes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.observability.metric_utils import compute_statistics, dict_add_prefix

if TYPE_CHECKING:
    from slime.data.sample import Sample

__all__ = ["request_metrics"]

_REQUESTS = ("sglang_generate", "sglang_generate_stream")
_OF_REQUEST = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
}
_OF_SUMMARY = {
    "pd_transfer_speed_gb_s": "prefill/transfer_speed_gb_s",
    "pd_transfer_total_mb": "prefill/transfer_total_mb",
    "pd_prefill_retry_count": "prefill/retry_count",
}
_PHASE = "sglang_pd_"


def request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Statistics over all finished requests of the samples, without prefix; empty where nothing was traced."""
    found: dict[str, list[float]] = defaultdict(list)
    count = profiled = 0
    for event in _events(samples):
        kind = event["type"]
        if kind == "span_start":  # half of all events; what is measured is at the end
            continue
        attrs, name = event.get("attrs", {}), event["name"]
        if kind == "span_end" and name in _REQUESTS:
            values = {metric: attrs[key] for key, metric in _OF_REQUEST.items() if _is_number(attrs.get(key))}
            count += 1
            profiled += bool(values)
            for metric, value in values.items():
                found[metric].append(float(value))
        elif kind == "span_end" and name.startswith(_PHASE) and _is_number(attrs.get("duration_s")):
            phase, _, segment = name.removeprefix(_PHASE).partition("_")
            if segment:
                found[f"{phase}/{segment}_duration"].append(float(attrs["duration_s"]))
        elif name == "sglang_pd_summary":
            for key, metric in _OF_SUMMARY.items():
                if _is_number(attrs.get(key)):
                    found[metric].append(float(attrs[key]))
    metrics: dict[str, float] = {}
    if count:
        metrics = {"request/count": float(count), "request/profiled_count": float(profiled)}
    for metric, numbers in found.items():
        metrics |= dict_add_prefix(compute_statistics(numbers), f"{metric}/")
    return metrics


def _events(samples: Sequence[Sample]) -> Iterator[Mapping[str, Any]]:
    """Every trace once: the samples of one execution may share theirs."""
    seen: set[int] = set()
    for sample in samples:
        trace = getattr(sample, "trace", None)
        if isinstance(trace, Mapping) and id(trace) not in seen:
            seen.add(id(trace))
            yield from trace.get("events", [])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
