"""One request to the engine: sampling parameters, token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol
from uuid import uuid4

from slime.agent.trajectory import TurnRecord
from slime.data.sampling_mask import sampled_tokens
from slime.utils.errors import EngineError
from slime.utils.http_utils import post

__all__ = ["DEFAULT_SID", "EngineAborted", "Session", "call_sglang_generate"]

DEFAULT_SID = "default"
DEFAULT_MAX_NEW_TOKENS = 4096
_ABORT_TIMEOUT_S = 5.0
_LOG_PROB_KEYS = ("output_token_logprobs", "output_token_sampling_logprobs", "input_token_logprobs")
_CLIENT_SAMPLING_KEYS = ("temperature", "top_p", "top_k")


class EngineAborted(EngineError):
    """The engine gave up a request before the model was done."""


@dataclass
class Session:
    """Settings of one agent's run.

    Attributes:
        sampling_defaults: SGLang's sampling parameters, those of the rollout.
        max_context_tokens: prompt and output of a turn together, and length of a sample; 0: no limit.
    """

    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    max_context_tokens: int = 0


class _Adapter(Protocol):
    """What a request needs to know of :class:`slime.agent.adapters.common.BaseAdapter`."""

    sglang_url: str
    max_token_keys: ClassVar[tuple[str, ...]]
    stop_keys: ClassVar[tuple[str, ...]]
    client_sampling: bool
    request_timeout_s: float
    request_options: dict[str, Any]

    def note_ignored(self, key: str) -> None: ...


async def call_sglang_generate(
    prompt_ids: list[int],
    session: Session,
    body: dict[str, Any],
    *,
    adapter: _Adapter,
    session_id: str | None = None,
) -> TurnRecord:
    """Generate one turn.

    Returns:
        The turn; with no output and finish reason ``length``, without a request, where the context is full.

    Raises:
        EngineError: the engine refused or failed; EngineAborted: it gave the request up.
        DeadlineExceeded: no reply in time.
    """
    params = _sampling_params(session, body, adapter)
    if session.max_context_tokens > 0:
        room = session.max_context_tokens - len(prompt_ids)
        if room <= 0:
            return TurnRecord(prompt_ids, [], "length")
        params["max_new_tokens"] = min(params["max_new_tokens"], room)
    attempts: list[str] = []

    def payload() -> dict[str, Any]:
        attempts.append(uuid4().hex)
        request = {"rid": attempts[-1], "input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}
        return request | adapter.request_options

    is_named = session_id and session_id != DEFAULT_SID
    headers = {"X-SMG-Routing-Key": str(session_id)} if is_named else None
    try:
        reply = await post(
            f"{adapter.sglang_url}/generate",
            payload,
            max_retries=3,
            headers=headers,
            timeout_s=adapter.request_timeout_s,
        )
    except (asyncio.CancelledError, EngineError, TimeoutError):
        if attempts:
            await _abort(adapter.sglang_url, attempts[-1])
        raise
    return _turn_record(prompt_ids, reply)


def _turn_record(prompt_ids: list[int], reply: dict[str, Any]) -> TurnRecord:
    meta = reply["meta_info"]
    finish = str((meta.get("finish_reason") or {}).get("type") or "stop")
    if finish == "abort":
        raise EngineAborted("the engine aborted the request; send it again")
    tokens, log_probs = sampled_tokens(meta)
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
    cap = next((body[key] for key in adapter.max_token_keys if body.get(key) is not None), None)
    if cap is not None:
        params["max_new_tokens"] = min(params["max_new_tokens"], int(cap))
    for key in _CLIENT_SAMPLING_KEYS:
        if body.get(key) is None:
            continue
        if adapter.client_sampling:
            params[key] = body[key]
        elif params.get(key) != body[key]:
            adapter.note_ignored(key)
    stop = next((body[key] for key in adapter.stop_keys if body.get(key)), None)
    if stop:
        params["stop"] = stop
    return params


async def _abort(url: str, rid: str) -> None:
    """Best effort: a router has no such route, and an engine drops the requests of clients that are gone anyway."""
    with contextlib.suppress(EngineError, TimeoutError, RuntimeError):
        await post(f"{url}/abort_request", {"rid": rid}, max_retries=0, timeout_s=_ABORT_TIMEOUT_S)
