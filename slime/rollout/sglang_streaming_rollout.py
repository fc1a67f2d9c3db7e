"""Generation that sees its tokens come: ``--custom-generate-function-path`` ...``.generate_streaming``.

The engine sends what it has so far again and again; every event holds the whole response of the request. A rollout that
ends takes what came last and closes the connection, upon which the engine drops the request. Otherwise the result is
that of ``sglang_rollout.generate``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.data.sample import Sample
from slime.data.sampling_mask import sampled_tokens
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout import sglang_rollout
from slime.rollout.engine_request import EngineRequest, check_reply
from slime.rollout.failures import request_retries
from slime.rollout.settings import setting
from slime.utils.errors import EngineError
from slime.utils.http_utils import receive_stream

__all__ = ["generate_streaming"]


async def generate_streaming(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of one sample, or the rest of it, event by event.

    When the rollout is aborted meanwhile the sample keeps the tokens of the last event, with status ABORTED.

    Raises:
        DataError: a prompt that cannot be sent.
        EngineError: the request was refused, no engine answered, or the reply is not that of an SGLang server.
        ConnectionError: the reply broke off; the sample is as it was.
        DeadlineExceeded: ``--rollout-request-timeout`` passed.
    """
    state = sglang_rollout.GenerateState(args)
    request = await sglang_rollout.prepare_request(args, sample, sampling_params)
    if request is None:
        return sample
    last: dict[str, Any] | None = None

    def receive(event: Any) -> bool:
        nonlocal last
        last = _checked(request, event, sample)
        return not state.is_ending

    attrs = {"max_new_tokens": sampling_params["max_new_tokens"]}
    with trace_span(sample, "sglang_generate_stream", attrs=attrs) as span, state.waiting_for(request):
        await receive_stream(
            request.url,
            lambda: request.new_attempt() | {"stream": True},
            receive,
            max_retries=request_retries(args),
            headers=request.headers,
            timeout_s=setting(args, "rollout_request_timeout"),
        )
    if last is not None:
        span.update(build_sglang_meta_trace_attrs(last["meta_info"]))
    is_finished = last is not None and bool(last["meta_info"].get("finish_reason"))
    if not is_finished and not state.is_ending:
        raise ConnectionError(f"the stream of sample {sample.index} ended before the engine finished")
    if last is not None:
        _append(args, sample, last, is_finished)
    if not is_finished:
        sample.status = Sample.Status.ABORTED
    return sample


def _checked(request: EngineRequest, event: Any, sample: Sample) -> dict[str, Any]:
    if isinstance(event, dict) and "error" in event:
        raise EngineError(f"the engine refused sample {sample.index} in its stream: {str(event['error'])[:300]}")
    return check_reply(request, sample, event)


def _append(args: Namespace, sample: Sample, event: dict[str, Any], is_finished: bool) -> None:
    meta = event["meta_info"]
    tokens, log_probs = sampled_tokens(meta)
    count = meta.get("completion_tokens")
    if count is not None and len(tokens) < count:
        raise EngineError(
            f"an event for sample {sample.index} holds {len(tokens)} of {count} tokens: streaming needs events with "
            "the whole response, drop --sglang-incremental-streaming-output"
        )
    sample.append_response_tokens(
        args,
        tokens=tokens,
        log_probs=log_probs,
        text=event["text"],
        meta_info=meta,
        update_terminal_info=is_finished,
    )
