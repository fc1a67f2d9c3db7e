"""Traces of samples: nested spans and events with their times.

A sample carries its trace as a plain dict, so that it travels, is dumped and is read without this module:

    sample.trace = {"version": 1, "trace_id": hex, "sample_id", "group_id", "attempt", "events": [...]}
    event        = {"type": "span_start" | "span_end" | "event", "name", "ts": unix seconds, "trace_id", "sample_id",
                    "group_id", "attempt"[, "span_id"][, "parent_span_id"][, "attrs"]}

Called by the rollout and by users' functions. No function here raises an error of tracing: a failed trace must not cost
a sample. Open spans are kept per asyncio task, so concurrent samples do not mix.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import re
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slime.data.sample import Sample
from slime.observability.metric_utils import (
    SGLANG_PD_DECODE_SEGMENTS,
    SGLANG_PD_PREFILL_SEGMENTS,
    SGLANG_PD_SUMMARY_KEYS,
    SGLANG_TRACE_META_KEYS,
    TRACE_CHILDREN_KEY,
    build_sglang_meta_trace_attrs,
)
from slime.utils.errors import reported

__all__ = [
    "SGLANG_PD_DECODE_SEGMENTS",
    "SGLANG_PD_PREFILL_SEGMENTS",
    "SGLANG_PD_SUMMARY_KEYS",
    "SGLANG_TRACE_META_KEYS",
    "TRACE_CHILDREN_KEY",
    "TRACE_VERSION",
    "TraceHandle",
    "TraceSpanContext",
    "bind_trace",
    "bind_trace_carrier",
    "build_sglang_meta_trace_attrs",
    "export_trace",
    "import_trace",
    "trace_event",
    "trace_function",
    "trace_next_attempt",
    "trace_span",
]

logger = logging.getLogger(__name__)

TRACE_VERSION = 1
# Ids of OpenTelemetry.
_TRACE_ID, SPAN_ID = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")

# (trace id, span id) of the open spans of this task, outermost first.
_OPEN: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("slime_open_spans", default=())
_TARGETS: ContextVar[tuple[Any, ...]] = ContextVar("slime_span_targets", default=())
_WARNED: set[str] = set()
# Span ids of different processes must not be equal.
_PROCESS = uuid.uuid4().hex[:8]
_SPAN_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class TraceHandle:
    """Destination of the events of one sample.

    Attributes:
        carrier: the trace dict, shared with the sample that it was bound to.
        parent_span_id: parent of spans that are opened outside of any other, after a trip through another process.
    """

    carrier: dict[str, Any]
    parent_span_id: str | None = None

    @property
    def trace_id(self) -> str:
        return str(self.carrier["trace_id"])


class TraceSpanContext(AbstractContextManager["TraceSpanContext"]):
    """The value of ``with trace_span(...) as span``. Attributes set on it are stored with the span's end."""

    # a class and not a generator: four of these per sample are most of the cost of tracing

    __slots__ = ("_attrs", "_ends", "_given", "_members", "_name", "_record_error", "_started", "_target", "_tokens")

    def __init__(self, target: Any, name: str, attrs: Mapping[str, Any] | None, record_error: bool) -> None:
        self._target, self._name, self._given, self._record_error = target, name, attrs, record_error
        self._started = time.time()
        self._members: list[tuple[TraceHandle, str]] = []
        self._attrs: dict[str, Any] = {}
        self._ends: list[dict[str, Any]] = []
        self._tokens: tuple[Any, Any] | None = None

    def __enter__(self) -> TraceSpanContext:
        target = self._target
        handles = [bind_trace(target)] if type(target) is Sample else _handles(target)  # the common case by itself
        if handles:
            _quietly(self._open, handles, dict(self._given or {}))  # one that could not be opened accepts attributes
            opened = _OPEN.set((*_OPEN.get(), *[(handle.trace_id, span_id) for handle, span_id in self._members]))
            self._tokens = (opened, _TARGETS.set((*_TARGETS.get(), target)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._tokens is None:
            return
        if error is not None and self._record_error:
            self.update({"error_type": type(error).__name__, "error_message": str(error)[:500]})
        _quietly(self._close)
        _quietly(_OPEN.reset, self._tokens[0])
        _quietly(_TARGETS.reset, self._tokens[1])

    def set(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, attrs: Mapping[str, Any] | None) -> None:
        """Add attributes, also after the span has ended. ``_trace_children`` become child spans and events."""
        _quietly(self._update, dict(attrs or {}))

    set_attr = set
    update_attrs = update

    def _update(self, attrs: dict[str, Any]) -> None:
        children = attrs.pop(TRACE_CHILDREN_KEY, None) or []
        for handle, span_id in self._members:
            for child in children:
                _append_child(handle, child, self._started, span_id)
        self._attrs.update(attrs)
        # The span may have ended: its events are already in the trace.
        for end in self._ends:
            end["attrs"] = self._attrs

    def _open(self, handles: list[TraceHandle], attrs: dict[str, Any]) -> None:
        children = attrs.pop(TRACE_CHILDREN_KEY, None)
        for handle in handles:
            span_id, parent = _new_span_id(), _parent_of(handle)
            _append(handle, "span_start", self._name, self._started, attrs, span_id=span_id, parent_span_id=parent)
            self._members.append((handle, span_id))
        if children:
            self.update({TRACE_CHILDREN_KEY: children})

    def _close(self) -> None:
        now = time.time()
        for handle, span_id in self._members:
            self._ends.append(_append(handle, "span_end", self._name, now, self._attrs, span_id=span_id))


def bind_trace(sample: Sample) -> TraceHandle:
    """The handle of a sample. Adds a trace to a sample without one."""
    carrier = sample.trace
    if not isinstance(carrier, dict) or "events" not in carrier:
        carrier = _new_carrier(os.urandom(16).hex(), sample.index, sample.group_index, 0)
        sample.trace = carrier
    return TraceHandle(carrier)


def bind_trace_carrier(
    carrier: dict[str, Any],
    *,
    trace_id: str,
    sample_id: Any = None,
    group_id: Any = None,
    attempt: int = 0,
    parent_span_id: str | None = None,
) -> TraceHandle:
    """Continue a trace from elsewhere in ``carrier``, any dict."""
    for key, value in _new_carrier(trace_id, sample_id, group_id, attempt).items():
        carrier.setdefault(key, value)
    return TraceHandle(carrier, parent_span_id)


def export_trace(handle: TraceHandle) -> dict[str, Any]:
    """The data that another process needs to continue the trace. Small, and valid JSON."""
    names = ("trace_id", "sample_id", "group_id", "attempt")
    return {name: handle.carrier.get(name) for name in names} | {"parent_span_id": _parent_of(handle)}


def import_trace(payload: Mapping[str, Any], carrier: dict[str, Any] | None = None) -> TraceHandle:
    """The inverse of :func:`export_trace`, with an empty list of events or those of ``carrier``."""
    return bind_trace_carrier(
        {} if carrier is None else carrier,
        trace_id=str(payload.get("trace_id") or uuid.uuid4().hex),
        sample_id=payload.get("sample_id"),
        group_id=payload.get("group_id"),
        attempt=payload.get("attempt") or 0,
        parent_span_id=payload.get("parent_span_id"),
    )


def is_exported(trace_id: str, share: float) -> bool:
    """Whether a trace is in the share that is exported. Follows from the id, so header and exporter agree."""
    return _TRACE_ID.fullmatch(trace_id) is not None and int(trace_id[-8:], 16) < share * 16**8


def trace_headers(args: Namespace, target: Sample | TraceHandle) -> dict[str, str]:
    """``traceparent`` of a request, inside the span of the request. Empty without ``--trace-endpoint``.

    Its last field is 00 for a trace that is not exported: engines record no spans for it.
    """
    settings = vars(args)
    if settings.get("trace_endpoint") is None:
        return {}
    known = export_trace(target if isinstance(target, TraceHandle) else bind_trace(target))
    trace_id, span_id = str(known["trace_id"]), str(known["parent_span_id"])
    if not (_TRACE_ID.fullmatch(trace_id) and SPAN_ID.fullmatch(span_id)):
        return {}  # ids of a user's own trace
    return {
        "traceparent": f"00-{trace_id}-{span_id}-{'01' if is_exported(trace_id, settings['trace_share']) else '00'}"
    }


def trace_event(target: Any, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Add an event to the trace of every sample of ``target``, at the current time."""
    now = time.time()
    for handle in _handles(target):
        _quietly(_append, handle, "event", name, now, dict(attrs or {}), parent_span_id=_parent_of(handle))


def trace_next_attempt(target: Any, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Start the next attempt at the same sample. Later events belong to it."""
    for handle in _handles(target):
        handle.carrier["attempt"] = int(handle.carrier.get("attempt") or 0) + 1
    trace_event(target, "attempt_start", attrs=attrs)


def trace_span(
    target: Any, name: str, *, attrs: Mapping[str, Any] | None = None, record_error: bool = True
) -> AbstractContextManager[Any]:
    """A span around the block, on every sample of ``target``.

    Args:
        target: a sample, a handle, or a nested list of them. For anything else nothing is recorded, and the block gets
            a span without an effect.
        record_error: an exception that leaves the block is noted with its type and message. It propagates either way.
    """
    return TraceSpanContext(target, name, attrs, record_error)


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Any] | None = None,
    attrs_getter: Callable[..., Mapping[str, Any] | None] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a span around every call of a function, sync or async.

    Args:
        target: parameter that holds the sample. Without it and without a getter: the first argument that is one, else
            the target of the span that is open already.
        target_getter: called with the arguments, returns the target.
        attrs_getter: called with the arguments, returns attributes.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            found = _target_of_call(function, name, target, target_getter, arguments, named)
            attrs = None if attrs_getter is None else _quietly(attrs_getter, *arguments, **named)
            return trace_span(found, name, attrs=attrs, record_error=record_error)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_async(*arguments: Any, **named: Any) -> Any:
                with opened(arguments, named):
                    return await function(*arguments, **named)

            return traced_async

        @functools.wraps(function)
        def traced(*arguments: Any, **named: Any) -> Any:
            with opened(arguments, named):
                return function(*arguments, **named)

        return traced

    return decorate


_signature = functools.cache(inspect.signature)  # of decorated functions, whose signatures each sample needs


def _target_of_call(
    function: Callable[..., Any],
    name: str,
    target: str | None,
    getter: Callable[..., Any] | None,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    if getter is not None:
        return _quietly(getter, *arguments, **named)
    bound = _quietly(_signature(function).bind_partial, *arguments, **named)
    values = {} if bound is None else bound.arguments
    if target is not None:
        if target not in values:
            _warn_once(f"trace {name}: {function.__qualname__} was called without {target}; it is not traced")
        return values.get(target)
    for value in values.values():
        if _handles(value):
            _warn_once(f"trace {name}: no target was named; the first sample among the arguments is taken")
            return value
    return _TARGETS.get()[-1] if _TARGETS.get() else None


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        logger.warning(text)


def _new_carrier(trace_id: str, sample_id: Any, group_id: Any, attempt: int) -> dict[str, Any]:
    return {
        "version": TRACE_VERSION,
        "trace_id": trace_id,
        "sample_id": sample_id,
        "group_id": group_id,
        "attempt": attempt,
        "events": [],
    }


def _new_span_id() -> str:
    """An id that is unique over all processes."""
    # a counter with a random prefix: one random number per span would cost more
    return f"{_PROCESS}{next(_SPAN_NUMBERS):08x}"


def _parent_of(handle: TraceHandle) -> str | None:
    own = handle.carrier.get("trace_id")
    for trace_id, span_id in reversed(_OPEN.get()):
        # A task may hold open spans of other samples, which are not parents.
        if trace_id == own:
            return span_id
    return handle.parent_span_id


def _append(
    handle: TraceHandle,
    kind: str,
    name: str,
    ts: float,
    attrs: dict[str, Any],
    *,
    span_id: str | None = None,
    parent_span_id: str | None = None,
) -> dict[str, Any]:
    carrier = handle.carrier
    event = {
        "type": kind,
        "name": name,
        "ts": ts,
        "trace_id": carrier.get("trace_id"),
        "sample_id": carrier.get("sample_id"),
        "group_id": carrier.get("group_id"),
        "attempt": carrier.get("attempt"),
    }
    # no loop over the optional keys: this runs for every span of every sample
    if span_id is not None:
        event["span_id"] = span_id
    if parent_span_id is not None:
        event["parent_span_id"] = parent_span_id
    if attrs:
        event["attrs"] = attrs
    carrier["events"].append(event)
    return event


def _append_child(handle: TraceHandle, child: Mapping[str, Any], started: float, parent: str) -> None:
    begin, attrs = started + float(child.get("start_offset", 0.0)), dict(child.get("attrs") or {})
    name = str(child["name"])
    if child.get("type") == "event":
        _append(handle, "event", name, begin, attrs, parent_span_id=parent)
        return
    span_id = _new_span_id()
    _append(handle, "span_start", name, begin, {}, span_id=span_id, parent_span_id=parent)
    for inner in child.get("children") or []:
        _append_child(handle, inner, started, span_id)
    _append(handle, "span_end", name, started + float(child.get("end_offset", 0.0)), attrs, span_id=span_id)


def _handles(target: Any) -> list[TraceHandle]:
    """The handles of a target. None for objects that cannot carry a trace."""
    return _quietly(lambda: list(_find_handles(target))) or []


def _find_handles(target: Any) -> Iterator[TraceHandle]:
    if isinstance(target, TraceHandle):
        yield target
    elif isinstance(target, Sample):
        yield bind_trace(target)
    elif isinstance(target, list | tuple):
        for item in target:
            yield from _find_handles(item)
    elif type(target).__name__ == "SampleBox":  # a pair of prompt and generation in plugins of the field
        yield from _find_handles(getattr(target, "generation", None) or getattr(target, "prompt_sample", None))


def _quietly(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result, or None if tracing fails: its errors must not reach the caller."""
    with reported(lambda _: logger.debug("tracing failed", exc_info=True)):
        return function(*arguments, **named)
    return None
