"""Arithmetic on lists of numbers and texts for metrics, and metrics of single requests. Standard library only.

Also the cost of a step (seconds by phase, tokens and FLOPs per second, bytes of a weight sync; called by the loop once
per rollout with all measurements), and the timings in SGLang's replies, as attributes of the span around a request.
"""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import math
import statistics
import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from slime.data.sample import Sample


Value = TypeVar("Value")

# Characters at the end of a response that are compressed.
_REPETITION_WINDOW = 10_000
# Size before / size after. Ordinary text is far below.
_REPETITION_RATIO = 10.0


def dict_add_prefix(d: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """``{"a": 1}`` with prefix ``"x/"`` -> ``{"x/a": 1}``."""
    return {f"{prefix}{name}": value for name, value in d.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, max and min of at least one number."""
    return {
        "mean": float(statistics.fmean(values)),
        "median": float(statistics.median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... <= ``group_size``, averaged over prompts. A reward of exactly 1 is correct.

    Args:
        flat_rewards: rewards of ``num_groups`` prompts, ``group_size`` consecutive samples each.

    Returns:
        ``{"pass@1": ...}``, empty for groups of one sample, because it would repeat the mean reward.
    """
    if group_size == 1:
        return {}
    if num_groups is None:
        num_groups = len(flat_rewards) // group_size
    assert len(flat_rewards) == num_groups * group_size, f"{len(flat_rewards)} != {num_groups} x {group_size}"
    groups = [flat_rewards[i * group_size : (i + 1) * group_size] for i in range(num_groups)]
    num_correct = [sum(reward == 1 for reward in group) for group in groups]
    powers = [2**i for i in range(group_size.bit_length())]
    return {f"pass@{k}": statistics.fmean(_estimate_pass_at_k(group_size, c, k) for c in num_correct) for k in powers}


def _estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them correct, drawn without replacement, hold a correct one.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def compression_ratio(
    data: str | bytes,
    encoding: str = "utf-8",
    algorithm: Literal["zlib", "gzip", "bz2", "lzma"] = "zlib",
    level: int = 9,
) -> tuple[float, float]:
    """(size before / size after, saved percent). ``(inf, 0.0)`` for nothing."""
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return float("inf"), 0.0
    match algorithm:
        case "zlib":
            packed = zlib.compress(raw, level)
        case "gzip":
            packed = gzip.compress(raw, level)
        case "bz2":
            packed = bz2.compress(raw, level)
        case "lzma":
            packed = lzma.compress(raw, preset=level)
        case _:
            raise ValueError(f"algorithm {algorithm!r} is unknown: use zlib, gzip, bz2 or lzma")
    return len(raw) / len(packed), 100.0 * (1.0 - len(packed) / len(raw))


def has_repetition(text: str) -> bool:
    """Whether the end of a long text repeats itself."""
    if len(text) <= _REPETITION_WINDOW:
        return False
    return compression_ratio(text[-_REPETITION_WINDOW:])[0] > _REPETITION_RATIO


def compute_rollout_step(args: Namespace | Any, rollout_id: int) -> int:
    """The place of a rollout on its axis: its number, or the number of optimizer steps before it."""
    if args.wandb_always_use_train_step:
        return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
    return rollout_id


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
    """Statistics over all finished requests of the samples, without prefix. Empty without traces."""
    found: dict[str, list[float]] = defaultdict(list)
    count = profiled = 0
    for event in _events(samples):
        kind = event["type"]
        if kind == "span_start":  # half of all events. Measurements are at the end of a span
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
    """Events of every trace once: the samples of one execution may share a trace."""
    seen: set[int] = set()
    for sample in samples:
        trace = sample.trace
        if isinstance(trace, Mapping) and id(trace) not in seen:
            seen.add(id(trace))
            yield from trace.get("events", [])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


logger = logging.getLogger(__name__)

MISMATCH_BAND = 0.1
"""Mean |trainer - engine| log-prob of a healthy run in bfloat16 stays well below. See docs/debugging.md."""

_NAMES = {"sync": "update_weights"}


@dataclass(frozen=True)
class Work:
    """The work of a step.

    Attributes:
        num_tokens: prompt and response tokens that were trained on.
        forward_flops: floating-point operations of one forward pass over them.
        num_ranks: of the trainer.
        num_synced_bytes: weights sent to each engine.
        changed_share: changed bytes over all bytes, if the weights were sent as differences.
    """

    num_tokens: int = 0
    forward_flops: float = 0.0
    num_ranks: int = 0
    num_synced_bytes: int = 0
    changed_share: float | None = None


def perf_metrics(seconds: Mapping[str, float], work: Work) -> dict[str, float]:
    """``perf/<phase>_time`` in seconds, and the rates derived from them.

    Args:
        seconds: by phase. ``train_wait`` is the time from the end of one training to the begin of the next.
    """
    named = {_NAMES.get(name, name): value for name, value in seconds.items()}
    metrics = {f"{name}_time": value for name, value in named.items()}
    if "train" in named:
        step = named["train"] + named.get("train_wait", 0.0)
        metrics["step_time"] = step
        metrics["wait_time_ratio"] = named.get("train_wait", 0.0) / step if step else 0.0
    # a backward pass costs two forward passes
    for phase, passes in (("log_probs", 1), ("ref_log_probs", 1), ("teacher_log_probs", 1), ("actor_train", 3)):
        if named.get(phase) and work.forward_flops and work.num_ranks:
            metrics[f"{phase}_tflops"] = passes * work.forward_flops / work.num_ranks / 1e12 / named[phase]
    if named.get("actor_train") and work.num_tokens:
        metrics["actor_train_tok_per_s"] = work.num_tokens / named["actor_train"]
    if named.get("update_weights") and work.num_synced_bytes:
        metrics["update_weights_bytes"] = float(work.num_synced_bytes)
        metrics["update_weights_gb_per_s"] = work.num_synced_bytes / 1e9 / named["update_weights"]
        if work.changed_share is not None:
            # A delta sync sends files, so these bytes are the written ones.
            metrics["update_weights_wire_bytes"] = float(work.num_synced_bytes)
            metrics["update_weights_density"] = work.changed_share
    return {f"perf/{name}": value for name, value in metrics.items()}


def warn_if_mismatched(rollout_id: int, steps: Sequence[Mapping[str, float]], run: Path | None) -> None:
    """Warn if log-probs of trainer and engine differ, and name the command that finds the cause."""
    # Steps without the engine's log-probs have nothing to compare.
    worst = max((step.get("train_rollout_logprob_abs_diff", 0.0) for step in steps), default=0.0)
    if worst > MISMATCH_BAND:
        logger.warning(
            "rollout %d: log-probs of trainer and engine differ by %.3f on average, more than %.1f. "
            "`slime doctor mismatch %s --rollout %d` finds the cause.",
            rollout_id,
            worst,
            MISMATCH_BAND,
            run or "<run>",
            rollout_id,
        )


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
