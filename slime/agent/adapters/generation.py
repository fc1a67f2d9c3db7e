"""One request to the engine: sampling parameters, token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from slime.agent.trajectory import Message, TurnRecord
from slime.data.engine_fields import LACKS_SETS, PAST_THE_ROUTER, REPLAY_TOP_K, FieldFlags, lacks_sets, sampled_tokens
from slime.observability.trace_utils import TraceHandle, trace_headers, trace_span
from slime.rollout.direct_engines import DirectEngines, EngineChoice, with_packed_experts
from slime.rollout.engine_request import EngineRequest, abort_at, send
from slime.utils.errors import EngineError
from slime.utils.http_utils import post

DEFAULT_SID = "default"
DEFAULT_MAX_NEW_TOKENS = 4096
_LOG_PROB_KEYS = ("output_token_logprobs", "output_token_sampling_logprobs", "input_token_logprobs")
_CUTS = ("top_p", "top_k")
_CLIENT_SAMPLING_KEYS = ("temperature", *_CUTS)


class EngineAborted(EngineError):
    """The engine gave up a request before the model had finished."""


class SamplingRefused(ValueError):
    """A client asks for sampling that could not be trained."""


@dataclass
class Session:
    """Settings of one agent's run.

    Attributes:
        sampling_defaults: SGLang's sampling parameters, those of the rollout.
        max_context_tokens: prompt and output of a turn together, and length of a sample. 0: no limit.
        responses: id of a response -> the conversation up to it, for ``previous_response_id``.
        trace: gets a span for each turn, inside the span that opened the session.
        num_accepted: turns that were accepted, also those that failed.
    """

    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0
    responses: dict[str, list[Message]] = field(default_factory=dict)
    trace: TraceHandle | None = None
    num_accepted: int = 0


class _Adapter(Protocol):
    """The attributes of :class:`slime.agent.adapters.common.BaseAdapter` that a request reads."""

    sglang_url: str
    engines: DirectEngines
    args: Any
    max_token_keys: ClassVar[tuple[str, ...]]
    stop_keys: ClassVar[tuple[str, ...]]
    client_sampling: bool
    request_timeout_s: float
    request_options: dict[str, Any]

    def note_ignored(self, key: str) -> None: ...


async def call_sglang_generate(
    prompt_ids: list[int], session: Session, body: dict[str, Any], *, adapter: _Adapter, session_id: str | None = None
) -> TurnRecord:
    """Generate one turn.

    Returns:
        The turn. If the context is full, no request is sent, and the turn has no output and finish reason ``length``.

    Raises:
        SamplingRefused: the client's sampling parameters cannot be trained.
        EngineError: the engine refused or failed. EngineAborted: it gave the request up.
        DeadlineExceeded: no reply in time.
    """
    params = _sampling_params(session, body, adapter)
    if session.max_context_tokens > 0:
        room = session.max_context_tokens - len(prompt_ids)
        if room <= 0:
            return TurnRecord(prompt_ids, [], "length")
        params["max_new_tokens"] = min(params["max_new_tokens"], room)
    options = _options(session, adapter)
    # All clients without an id share the default session, which must not bind them to one engine.
    name = session_id if session_id != DEFAULT_SID else None
    is_direct = not PAST_THE_ROUTER.isdisjoint(options)
    url = adapter.engines.choose(name) if is_direct else f"{adapter.sglang_url}/generate"
    headers = {"X-SMG-Routing-Key": str(name)} if name else {}
    payload = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True} | options
    request = EngineRequest(url, payload, None, workers_url=f"{adapter.sglang_url}/workers")
    try:
        with trace_span(session.trace, "sglang_generate", attrs={"max_new_tokens": params["max_new_tokens"]}):
            if session.trace is not None and adapter.args is not None:
                headers |= trace_headers(adapter.args, session.trace)
            reply = await send(
                request, post, max_retries=3, headers=headers or None, timeout_s=adapter.request_timeout_s
            )
    # Also if the client disconnected: the engine would generate to the end.
    except (asyncio.CancelledError, EngineError, TimeoutError):
        if request.rids:
            at = url.last_url if isinstance(url, EngineChoice) else None
            await _abort(at or adapter.sglang_url, request.rids[-1])
        raise
    if lacks_sets(options, reply["meta_info"]) and _finish_reason(reply) != "abort":
        raise EngineError(LACKS_SETS)
    return _turn_record(prompt_ids, await with_packed_experts(reply))


def _options(session: Session, adapter: _Adapter) -> dict[str, Any]:
    """Further fields of the request: those that the trainer needs, and ``request_options``."""
    needed = {
        "return_sampling_mask": _replays_sets(session, adapter),
        "return_routed_experts": getattr(adapter.args, "use_rollout_routing_replay", False),
    }
    asked = {key: True for key, is_needed in needed.items() if is_needed}
    return asked | _flags(adapter).adapter_fields | adapter.request_options


def _finish_reason(reply: dict[str, Any]) -> str:
    return str((reply["meta_info"].get("finish_reason") or {}).get("type") or "stop")


def _turn_record(prompt_ids: list[int], reply: dict[str, Any]) -> TurnRecord:
    meta, finish = reply["meta_info"], _finish_reason(reply)
    if finish == "abort":
        raise EngineAborted("the engine aborted the request; send it again")
    tokens, log_probs = sampled_tokens(meta)
    # The lists of log-probs are large, and their values are already extracted.
    kept = {key: value for key, value in meta.items() if key not in _LOG_PROB_KEYS}
    return TurnRecord(
        prompt_ids,
        output_ids=[int(token) for token in tokens],
        finish_reason=finish,
        output_log_probs=[float(value) for value in log_probs],
        meta_info=kept,
    )


def _sampling_params(session: Session, body: dict[str, Any], adapter: _Adapter) -> dict[str, Any]:
    params: dict[str, Any] = {
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "max_new_tokens": DEFAULT_MAX_NEW_TOKENS,
        **session.sampling_defaults,
    }
    key = next((key for key in adapter.max_token_keys if body.get(key) is not None), None)
    if key is not None:
        cap = body[key]
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not 1 <= cap < math.inf:
            raise SamplingRefused(f"{key} must be a positive number, got {cap!r}")
        params["max_new_tokens"] = min(params["max_new_tokens"], int(cap))
    for key in _CLIENT_SAMPLING_KEYS:
        if body.get(key) is None:
            continue
        if adapter.client_sampling:
            params[key] = body[key]
        elif params.get(key) != body[key]:
            adapter.note_ignored(key)
    # The engine returns sets of a bounded size only.
    if _replays_sets(session, adapter):
        if params.get("top_k", -1) == -1:
            params["top_k"] = REPLAY_TOP_K
    elif adapter.client_sampling and _cuts(body):
        cut = {key: body[key] for key in _CUTS if key in body}
        raise SamplingRefused(
            f"{cut} leaves a part of the vocabulary, and the run samples from all of it: the trainer would take the "
            "turn for one that was sampled so. Leave it out, or start the run with --rollout-top-p or --rollout-top-k"
        )
    stop = next((body[key] for key in adapter.stop_keys if body.get(key)), None)
    if stop:
        params["stop"] = stop
    return params


def _replays_sets(session: Session, adapter: _Adapter) -> bool:
    """Whether the trainer needs the ids that each token was sampled from."""
    return _cuts(session.sampling_defaults) if adapter.args is None else _flags(adapter).cuts_vocabulary


def _flags(adapter: _Adapter) -> FieldFlags:
    given = {} if adapter.args is None else vars(adapter.args)
    return FieldFlags(**{name: given[name] for name in vars(FieldFlags()) if name in given})


def _cuts(params: dict[str, Any]) -> bool:
    return params.get("top_p") not in (None, 1) or params.get("top_k") not in (None, -1)


async def _abort(url: str, rid: str) -> None:
    """Abort a request, without errors."""
    # A router has no such route. An engine drops the requests of closed connections anyway.
    with contextlib.suppress(EngineError, TimeoutError, RuntimeError):
        await abort_at(url, {"rid": rid})
